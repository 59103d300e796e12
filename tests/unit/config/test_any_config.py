"""Whatever a config holds, checking it says what is wrong and never fails itself."""

from __future__ import annotations

from typing import Any

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.config import ModelFacts, ResolvedEngineConfig, Role, check_engine_configs, schema
from trtx.config.findings import SEVERITIES
from trtx.config.rules import RULES
from trtx.config.versions import COLUMNS

SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "speculative_config": "SpeculativeConfig",
    "moe_config": "MoeConfig",
    "lora_config": "LoraConfig",
    "cp_config": "CpConfig",
    "multimodal_config": "MultimodalConfig",
}
WORDS = [
    "auto",
    "fp8",
    "bfloat16",
    "PYTHON",
    "CPP",
    "NIXL",
    "UCX",
    "GMS",
    "_autodeploy",
    "HELIX",
    "Eagle3",
    "MTP",
    "NGram",
]
PATHS = sorted(schema.known_fields()) + sorted(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in schema.known_fields(model)
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4096),
    st.floats(-1, 2),
    st.sampled_from(WORDS),
    st.lists(st.integers(0, 512), max_size=3),
    st.dictionaries(st.integers(1, 64), st.integers(0, 4), max_size=2),
    st.dictionaries(st.sampled_from(WORDS), st.integers(0, 4), max_size=1),
)
CHANGES = st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=12)
UNMENDABLE = {rule.id: rule.unmendable for rule in RULES}
ROLES: tuple[Role, ...] = ("agg", "prefill", "decode", "encode")


def config_of(role: Role, changes: dict[str, Any]) -> ResolvedEngineConfig:
    values: dict[str, Any] = {}
    for path, value in sorted(changes.items()):
        section, _, name = path.rpartition(".")
        if not section:
            values[name] = value
        elif isinstance(inner := values.setdefault(section, {}), dict):
            inner[name] = value
    return ResolvedEngineConfig(role, values, "drawn", ())


@settings(max_examples=examples(200), deadline=None)
@given(
    drawn=st.lists(CHANGES, min_size=4, max_size=4),
    version=st.sampled_from([*COLUMNS, "1.3.0rc14", "1.3.0rc23", None]),
    engine=st.sampled_from(["tensorrt-llm", "torch", "paced"]),
    architecture=st.sampled_from(["DeepseekV3ForCausalLM", "Llama4ForConditionalGeneration"]),
)
def test_any_config_is_checked(
    drawn: list[dict[str, Any]], version: str | None, engine: str, architecture: str
) -> None:
    configs = {role: config_of(role, changes) for role, changes in zip(ROLES, drawn, strict=True)}
    findings = check_engine_configs(
        configs, engine=engine, version=version, model=ModelFacts(architecture, 131072), gpus=("NVIDIA H200",)
    )
    order = [SEVERITIES.index(finding.severity) for finding in findings]
    assert order == sorted(order)
    for finding in findings:
        assert finding.rule in str(finding)
        assert finding.roles and set(finding.roles) <= set(ROLES)
        if finding.rule in UNMENDABLE:
            assert (finding.fix is None) == (finding.path in UNMENDABLE[finding.rule]), finding

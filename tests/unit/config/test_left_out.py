"""Every field of TensorRT-LLM's schema, on every engine: acted on, refused, or named as left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trtx.config import (
    ResolvedEngineConfig,
    Role,
    TopologySpec,
    check_engine_configs,
    load_engine_config,
    recipe_files,
    schema,
)
from trtx.config.engine_uses import acts_on, in_force_and_left_out
from trtx.config.left_out import left_out_notes, left_out_warnings, without_left_out
from trtx.config.schema import findings, known_fields, nested_model
from trtx.config.torch_fields import ENCODER_FIELDS
from trtx.engine.paced import PacedArgs
from trtx.engine.tensorrt_llm.arguments import for_encoder, for_llm
from trtx.errors import UsageError
from trtx.ipc.encoder_messages import EncoderArgs
from trtx.topology import BrokerPorts, Gpu, Machine, Plan, Ports, plan
from trtx.torch_engine.llmapi.arguments import resolve_llm_args

pytestmark = pytest.mark.slow

FACTS = json.loads((Path(schema.__file__).parent / "llm_args.json").read_text())


def stated(facts: Any) -> Iterator[Any]:
    """Every value that some field lists as allowed."""
    for name, value in facts.items() if isinstance(facts, dict) else ():
        if name == "allowed" and isinstance(value, list):
            yield from value
    for value in facts.values() if isinstance(facts, dict) else facts if isinstance(facts, list) else ():
        yield from stated(value)


PLAIN: tuple[Any, ...] = (
    True, 2, 64, 0.25, "text", "fp8", "auto", [1], ["a"], {"a": 1}, {"a": "b"}, {"1": [0]}, [[0]], {}, 1, 0,
)  # fmt: skip
ALGORITHMS = FACTS["sparse_attention_config"]["algorithms"]
STATED = sorted({one for one in (*stated(FACTS), *ALGORITHMS) if isinstance(one, str)})
UNIONS = {  # section: what tells its kinds apart, and its model
    "speculative_config": ("decoding_type", "SpeculativeConfig"),
    "sparse_attention_config": ("algorithm", "SparseAttentionConfig"),
}


def paths(model: str = "LlmArgs", prefix: str = "") -> Iterator[str]:
    """Every field, those of sections included, however deep."""
    models = (model, *(["EncodeCudaGraphConfig"] if model == "CudaGraphConfig" else []))
    for name in sorted(set().union(*map(known_fields, models))):
        inner = nested_model(model, {name: 0}, name)
        yield f"{prefix}{name}"
        if inner is not None and prefix.count(".") < 3:
            yield from paths(inner, f"{prefix}{name}.")


def nested(path: str, value: object, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: {**(beside or {}), **nested(rest, value)} if rest else value}


def taken(path: str) -> list[dict[str, Any]]:
    """Configs with this field alone, as far as its section can do without others, whose values TensorRT-LLM takes."""
    for candidates in (PLAIN, STATED, [[one] for one in STATED]):
        found = [config for value in candidates if is_taken(config := nested(path, value, beside(path)))]
        if found:
            return found[:6]
    return []


def is_taken(config: Mapping[str, Any]) -> bool:
    return all(one.kind in ("other-version", "missing-field") for one in findings(config))


def beside(path: str) -> dict[str, Any]:
    """What a section has to say of itself, for it to have this field."""
    section, _, name = path.partition(".")
    chooser, model = UNIONS.get(section, ("", ""))
    if not chooser or name in ("", chooser):
        return {}
    kinds = [one.removeprefix(f"{model}:") for one in schema._models() if one.startswith(f"{model}:")]
    return {chooser: next(one for one in kinds if name.partition(".")[0] in known_fields(f"{model}:{one}"))}


ALL = [path for path in paths() if path.partition(".")[0] not in ("model", "tokenizer")]  # --model names them
BY_PATH = {path: taken(path) for path in ALL}
EVERY = [(path, given) for path, configs in BY_PATH.items() for given in configs]
FIRST = [(path, configs[0]) for path, configs in BY_PATH.items() if configs]


def test_the_walk_reaches_every_field_and_finds_values_for_them() -> None:
    assert len(ALL) > 400
    assert not [path for path in ALL if not BY_PATH[path]], "give PLAIN a value that these take"


def names(path: str, left_out: Mapping[str, Any]) -> bool:
    """The field is named, or each part of it, or what it stands in."""
    return any(f"{one}.".startswith(f"{path}.") or f"{path}.".startswith(f"{one}.") for one in left_out)


def test_the_torch_engine_acts_on_a_field_or_refuses_it_or_it_is_named() -> None:
    """The oracle is the engine's own reading of its arguments."""
    default, _ = resolve_llm_args("m", {})
    for path, given in EVERY:
        in_force, left_out = in_force_and_left_out(given, "torch", "agg", on_gpu=True)
        try:
            args, unsupported = resolve_llm_args("m", given)
        except ValueError:
            continue
        assert resolve_llm_args("m", in_force) == (args, {}), f"{given}: what was left out was in force"
        assert unsupported.keys() == left_out.keys()
        if args != default:
            assert not names(path, left_out), f"{given} is acted on, and called left out"
        elif not names(path, left_out):
            assert acts_on("torch", "agg", path, given, on_gpu=True), f"{given} changes nothing, and is not named"


def test_what_an_encoder_acts_on_is_what_it_has_arguments_for() -> None:
    assert {*ENCODER_FIELDS} == {one.name for one in fields(EncoderArgs)} - {"model", "arena_bytes"}
    given = {"max_batch_size": 2, "max_seq_len": 64, "kv_cache_config": {"max_tokens": 64}}
    assert in_force_and_left_out(given, "torch", "encode", on_gpu=True) == (
        {"max_batch_size": 2},
        {"max_seq_len": 64, "kv_cache_config.max_tokens": 64},
    )


def test_what_the_paced_engine_acts_on_is_what_it_has_arguments_for() -> None:
    acted_on = {path for path in ALL if acts_on("paced", "agg", path, {}, on_gpu=False)}
    assert acted_on | {"paced_ttft_ms", "paced_itl_ms"} == {one.name for one in fields(PacedArgs)}
    assert acts_on("paced", "agg", "paced_itl_ms", {}, on_gpu=False)


class Model:
    path = Path("/models/tiny")
    served_model_name = "tiny"


def planned(engine: str, values: Mapping[str, Any], *, gpus: int = 0, **said: Any) -> Plan:
    config = ResolvedEngineConfig("agg", dict(values), "own.yaml", (), is_own=True)
    found = tuple(Gpu(index, f"GPU-{index}", "Test GPU", 80 << 30, ()) for index in range(gpus))
    return plan(
        TopologySpec(**said),
        Machine(found, 8),
        checkpoint=Model(),
        engine=engine,
        engine_configs={"agg": config},
        ports=Ports((8000,), (BrokerPorts(9000, 9001),), (9002,)),
        namespace="trtx-test",
        run_dir=Path("/runs/one"),
        scratch_dir=Path("/scratch"),
    )


def test_a_field_changes_the_command_of_the_simulated_engine_or_it_is_named() -> None:
    plain = planned("simulated", {}).workers[0].argv
    for path, given in EVERY:
        try:
            made = planned("simulated", given)
        except UsageError:
            continue
        left_out = {one.path for one in made.left_out}
        if made.workers[0].argv != plain:
            assert not left_out, f"{given} is acted on, and called left out"
        elif not left_out:
            assert acts_on("simulated", "agg", path, {}, on_gpu=False), f"{given} changes nothing, and is not named"


@pytest.mark.parametrize("backend", ["pytorch", "_autodeploy"])
@pytest.mark.parametrize("role", ["agg", "encode"])
def test_what_tensorrt_llm_is_not_handed_is_named(backend: str, role: Role) -> None:
    for path, given in FIRST:
        if path == "backend":
            continue
        values = {**given, "backend": backend}
        handed = for_llm(values) if role == "agg" else for_encoder(values, "Qwen2_5_VLForConditionalGeneration")
        in_force, left_out = in_force_and_left_out(values, "tensorrt-llm", role, on_gpu=True)
        top = path.partition(".")[0]
        size = top in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        if backend == "_autodeploy" and role == "agg" and size:
            assert handed["world_size"] == given[top] and not left_out
        else:
            assert (top in handed) is not names(path, left_out), path
        kept = for_llm(in_force) if role == "agg" else for_encoder(in_force, "Qwen2_5_VLForConditionalGeneration")
        assert kept == handed


@pytest.mark.parametrize("engine", ["torch", "paced", "simulated"])
def test_every_field_that_is_left_out_of_a_plan_is_named_in_its_warning(engine: str) -> None:
    for _, given in FIRST:
        found = check_engine_configs({"agg": ResolvedEngineConfig("agg", given, "own.yaml", ())}, engine=engine)
        if engine == "torch" and any(one.severity == "error" for one in found):
            continue
        try:
            made = planned(engine, given)
        except UsageError:
            continue
        told = " ".join(made.all_warnings)
        for one in made.left_out:
            assert one.path in told and "own.yaml" in told
            value: Any = made.engine_configs["agg"]
            for part in one.path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            assert value is None, f"{one.path} is left out and stands in the config that runs"


def config_of(*overrides: str, path: Path | None = None, engine: str = "torch") -> ResolvedEngineConfig:
    return load_engine_config("agg", family="tiny", path=path, overrides=overrides, engine=engine)


def warning_of(config: ResolvedEngineConfig) -> str:
    return " ".join(left_out_warnings(without_left_out(config, "torch", on_gpu=False)[1], "torch"))


def test_null_asks_for_nothing_and_a_default_that_is_typed_is_named_as_any_value() -> None:
    config = config_of(
        "moe_config=null", "kv_cache_config.max_gpu_total_bytes=null", "torch_compile_config={enable_fullgraph: null}"
    )
    in_force, left_out = without_left_out(config, "torch", on_gpu=False)
    assert [one.path for one in left_out] == ["torch_compile_config"]
    assert not {"moe_config", "torch_compile_config"} & in_force.keys()
    assert "max_gpu_total_bytes" not in in_force["kv_cache_config"]
    assert "stream_interval (--set)" in warning_of(config_of("stream_interval=1"))


def test_each_field_of_a_section_that_is_typed_whole_is_named() -> None:
    typed = "kv_cache_config={max_gpu_total_bytes: 5, tokens_per_block: 64, block_reuse_config: {policy: x}}"
    in_force, left_out = without_left_out(config_of(typed), "torch", on_gpu=False)
    assert in_force["kv_cache_config"] == {"tokens_per_block": 64}
    assert [(one.path, one.value) for one in left_out] == [
        ("kv_cache_config.max_gpu_total_bytes", 5),
        ("kv_cache_config.block_reuse_config.policy", "x"),
    ]
    one_of_a_dict = config_of("ray_worker_nsight_options={trace: cuda}")
    assert "ray_worker_nsight_options (--set)" in warning_of(one_of_a_dict)


def test_a_section_that_the_engine_acts_on_stays_though_all_that_is_said_of_it_is_left_out() -> None:
    """A worker without the section gets a transceiver, and one with an empty section has none."""
    config = config_of("cache_transceiver_config.max_tokens_in_buffer=8192")
    assert without_left_out(config, "torch", on_gpu=False)[0]["cache_transceiver_config"] == {}


def test_what_a_person_typed_is_told_apart_from_what_a_recipe_has(tmp_path: Path) -> None:
    recipe = recipe_files("qwen3")["agg"]
    shipped = config_of("kv_cache_config.max_gpu_total_bytes=5", path=recipe)
    _, left_out = without_left_out(shipped, "torch", on_gpu=True)
    (warning,), (note,) = left_out_warnings(left_out, "torch"), left_out_notes(left_out, "torch")
    assert warning.startswith(
        "engine torch does not act on kv_cache_config.max_gpu_total_bytes (--set), so nothing that is served or "
        "measured depends on it; leave it out"
    )
    graphs = "cuda_graph_config.enable_padding and cuda_graph_config.max_batch_size"
    assert note == f"engine torch does not act on {graphs} of engine_configs/qwen3/agg.yaml"

    own = tmp_path / "agg.yaml"
    own.write_text(recipe.read_text())
    _, left_out = without_left_out(config_of(path=own), "torch", on_gpu=True)
    assert "cuda_graph_config.enable_padding" in left_out_warnings(left_out, "torch")[0]
    assert not left_out_notes(left_out, "torch")


def test_without_a_gpu_what_only_a_gpu_takes_is_left_out_too() -> None:
    given = {"kv_cache_config": {"free_gpu_memory_fraction": 0.5}, "cuda_graph_config": {"batch_sizes": [1]}}
    assert {one.path for one in planned("torch", given).left_out} == {
        "kv_cache_config.free_gpu_memory_fraction",
        "cuda_graph_config.batch_sizes",
    }
    assert not planned("torch", given, gpus=1).left_out


def test_tp_of_an_engine_without_ranks_is_named_under_its_option() -> None:
    (warning,) = planned("paced", {}, tp=2).all_warnings
    assert "tensor_parallel_size (--tp)" in warning


def test_a_plan_is_read_back_with_what_it_left_out() -> None:
    made = planned("torch", {"moe_config": {"backend": "CUTLASS"}})
    assert made.left_out and Plan.from_json(made.to_json()) == made


def test_roles_that_leave_out_the_same_are_told_in_one_sentence() -> None:
    roles: tuple[Role, ...] = ("prefill", "decode")
    configs = [
        load_engine_config(role, family="tiny", path=None, overrides=("moe_config.backend=CUTLASS",), engine="torch")
        for role in roles
    ]
    left_out = itertools.chain(*(without_left_out(config, "torch", on_gpu=False)[1] for config in configs))
    (warning,) = left_out_warnings(left_out, "torch")
    assert warning.count("moe_config.backend") == 1

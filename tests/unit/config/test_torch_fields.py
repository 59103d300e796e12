"""Every argument of TensorRT-LLM has one place in the torch engine: honoured, unused, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.config.resolved import resolve
from trtx.config import Role, check_engine_configs, recipe_files, refuse_errors, torch_fields
from trtx.config.schema import default, known_fields
from trtx.config.torch_fields import FIELDS, REFUSED, SECTIONS, refused_fields
from trtx.config.torch_limits import outside_limits
from trtx.config.versions import COLUMNS, schema_version
from trtx.errors import UsageError
from trtx.torch_engine.llmapi.arguments import resolve_llm_args

MODELS = {
    "": ("LlmArgs",),
    "kv_cache_config": ("KvCacheConfig",),
    "cuda_graph_config": ("CudaGraphConfig", "EncodeCudaGraphConfig"),
    "scheduler_config": ("SchedulerConfig",),
    "cache_transceiver_config": ("CacheTransceiverConfig",),
    "speculative_config": ("SpeculativeConfig",),
    "quant_config": ("QuantConfig",),
    "sleep_config": ("SleepConfig",),
}
SERVED = ("tiny", "qwen2.5", "qwen3", "llama3")  # the folders of models that the torch engine runs
ROLES: tuple[Role, ...] = ("agg", "prefill", "decode")


@pytest.mark.parametrize("section", MODELS)
def test_every_field_of_the_schema_has_a_record_and_no_other_has(section: str) -> None:
    assert {"", *SECTIONS} == MODELS.keys()
    known = set().union(*(known_fields(model) for model in MODELS[section]))
    recorded = {path.rpartition(".")[2] for path in FIELDS if path.rpartition(".")[0] == section}
    assert recorded | (SECTIONS if not section else set()) == known


def test_no_field_has_two_records() -> None:
    """The record is written in three parts, and the last of two for one field would win."""
    assert len(torch_fields._HONOURED) + len(torch_fields._UNUSED) + len(REFUSED) == len(FIELDS)
    assert not FIELDS.keys() & SECTIONS


@pytest.mark.parametrize("path", REFUSED)
def test_what_tensorrt_llm_takes_where_nothing_is_set_is_never_refused(path: str) -> None:
    section, _, name = path.rpartition(".")
    for column in COLUMNS:
        value = default(path, schema_version(column), given=1 if section else 0)
        for harmless in (value, None, *REFUSED[path].harmless):
            values = {section: {name: harmless}} if section else {name: harmless}
            assert list(refused_fields(values)) == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"decoding_type": "MTP", "max_draft_len": 3},
            "speculative_config.decoding_type is 'MTP'; expected one of NGram, SA, Draft_Target, Eagle3",
        ),
        (
            {"decoding_type": "Eagle3", "max_draft_len": 3},
            "speculative_config.speculative_model is None; expected the draft model, which Eagle3 needs",
        ),
        (
            {"decoding_type": "Draft_Target", "max_draft_len": 64, "speculative_model": "m"},
            "max_draft_len is 64; expected at most 63, as max_num_tokens",
        ),
        (
            {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "m", "eagle3_one_model": False},
            "eagle3_one_model is False; expected true",
        ),
        (
            {"decoding_type": "NGram", "max_draft_len": 3, "speculative_model": "m"},
            "speculative_model is 'm'; expected none, as NGram drafts without a model",
        ),
        (
            {"decoding_type": "SA", "max_draft_len": 3, "speculative_model_dir": "m"},
            "speculative_model_dir is 'm'; expected none, as SA drafts without a model",
        ),
        ({"decoding_type": "NGram"}, "max_draft_len is None; expected the draft length of NGram"),
        ({"decoding_type": "NGram", "max_draft_len": 0}, "max_draft_len is 0; expected at least 1"),
        ({"decoding_type": "SA", "max_draft_len": 64}, "max_draft_len is 64; expected at most 63, as max_num_tokens"),
        ({"decoding_type": "SA", "max_draft_len": 31}, "max_draft_len is 31; expected at most 30, as max_seq_len is"),
        ({"decoding_type": "NGram", "max_draft_len": 2, "max_matching_ngram_size": -1}, "-1; expected at least 1, as"),
        (
            {"decoding_type": "NGram", "max_draft_len": 2, "max_concurrency": 4, "draft_len_schedule": {4: 2}},
            "expected none beside max_concurrency",
        ),
        ({"decoding_type": "NGram", "max_draft_len": 2, "draft_len_schedule": {0: 2}}, "expected batch sizes of at"),
        (
            {"decoding_type": "NGram", "max_draft_len": 2, "draft_len_schedule": {1: 2, 4: 3}},
            "draft_len_schedule is {1: 2, 4: 3}; expected draft lengths up to 2, as max_draft_len is 2",
        ),
        ({"decoding_type": "SA", "max_draft_len": 2, "global_pool_size": 9}, "is 9; expected none without enable_"),
        (
            {"decoding_type": "SA", "max_draft_len": 2, "enable_global_pool": True, "global_pool_size": 4},
            "global_pool_size is 4; expected at least 8, as max_batch_size is 8",
        ),
    ],
)
def test_speculation_that_can_not_run_is_refused_in_one_sentence(spec: dict[str, Any], says: str) -> None:
    values = {"speculative_config": spec, "max_num_tokens": 64, "max_seq_len": 32, "max_batch_size": 8}
    assert [str(found) for found in outside_limits(values) if says in str(found)]
    with pytest.raises(ValueError, match=re.escape(says)):
        resolve_llm_args("m", values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kv_cache_config": {"max_attention_window": [512, 32768]}}, "max_attention_window is [512, 32768]; expected"),
        ({"sparse_attention_config": {"algorithm": "rocket"}}, "sparse_attention_config is {'algorithm': 'rocket'}"),
        ({"lora_config": {"lora_dir": ["a"]}}, "lora_config is {'lora_dir': ['a']}; expected none, the torch engine"),
        (
            {"speculative_config": {"decoding_type": "MTP", "use_relaxed_acceptance_for_thinking": True}},
            "use_relaxed_acceptance_for_thinking is True; expected False, relaxed acceptance changes tokens",
        ),
        ({"load_format": "DUMMY"}, "load_format is 'DUMMY'; expected 'AUTO'"),
        ({"model_kwargs": {"num_hidden_layers": 2}}, "model_kwargs is {'num_hidden_layers': 2}; expected {}"),
        ({"quant_config": {"quant_algo": "FP8"}}, "quant_config.quant_algo is 'FP8'; expected none"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2; expected 1, the torch engine has no pipeline stages",
        ),
    ],
)
def test_a_value_that_would_change_answers_is_refused_with_the_way_out(values: dict[str, Any], says: str) -> None:
    (refused,) = refused_fields(values)
    assert says in str(refused)
    assert str(refused).endswith(refused.refusal.instead)


@pytest.mark.parametrize("size", [1 << 63, -(1 << 63) - 1])
def test_a_number_that_the_processes_cannot_exchange_is_refused(size: int) -> None:
    for path, values in (("max_stats_len", {"max_stats_len": size}), ("a.b", {"a": {"b": size}})):
        assert [str(found) for found in outside_limits(values)] == [f"{path} is {size}; expected a number of 64 bits"]
    with pytest.raises(ValueError, match="host_cache_size is 9223372036854775808; expected a number of 64 bits"):
        resolve_llm_args("m", {"kv_cache_config": {"host_cache_size": 1 << 63}})


def test_a_draft_must_fit_a_step_of_the_default_size_and_one_that_never_fits_has_no_length_to_take() -> None:
    spec = {"decoding_type": "SA", "max_draft_len": 8192}
    assert "expected at most 8191, as max_num_tokens is 8192" in str(*outside_limits({"speculative_config": spec}))
    told = str(*outside_limits({"speculative_config": spec | {"max_draft_len": 1}, "max_num_tokens": 1}))
    assert "max_draft_len is 1; expected no speculative_config, as max_num_tokens is 1" in told


def test_a_refusal_is_short_whatever_the_value_is() -> None:
    (refused,) = refused_fields({"env_overrides": {f"NAME_{number}": "x" * 100 for number in range(1000)}})
    assert len(str(refused)) < 300


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("role", ROLES)
def test_the_configs_of_the_models_that_it_runs_are_taken(family: str, role: Role) -> None:
    config = resolve(role, family=family, path=recipe_files(family)[role])
    assert list(refused_fields(config.values)) == []


def test_a_plan_refuses_what_the_engine_would_and_says_whose_it_is() -> None:
    override = ("kv_cache_config.max_attention_window=[512]",)
    with pytest.raises(UsageError) as refused:
        resolve("agg", *override, family="tiny")
    assert "agg: kv_cache_config.max_attention_window is [512]; expected none (agg, --set)" in str(refused.value)
    assert "takes the windows of layers from config.json of the checkpoint" in str(refused.value)
    for engine in ("tensorrt-llm", "paced"):
        config = resolve("agg", *override, family="tiny", engine=engine)
        refuse_errors(check_engine_configs({"agg": config}, engine=engine))


@pytest.mark.parametrize("modes", [{"lora": "NONE"}, {"kv_cache": "PINNED"}, {"model_weights": "ODD"}])
def test_a_restore_mode_that_the_engine_would_ignore_is_refused(modes: dict[str, str]) -> None:
    (found,) = outside_limits({"sleep_config": {"restore_modes": modes}})
    assert f"sleep_config.restore_modes is {modes}; expected NONE or MEMSET for kv_cache" in str(found)
    assert list(outside_limits({"sleep_config": {"restore_modes": {"model_weights": "CPU"}}})) == []

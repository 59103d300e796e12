"""LLM's keyword arguments: what is honoured, what is ignored by name, what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from trtx.config import ResolvedEngineConfig, check_engine_configs
from trtx.config.torch_fields import FIELDS, REFUSED, SECTIONS, Honoured
from trtx.errors import UsageError
from trtx.memory.torch_engine import compute_dtype, kv_dtype
from trtx.torch_engine.core.process import runner_args
from trtx.torch_engine.llm_args import KvCacheConfig, LlmArgs
from trtx.torch_engine.llmapi.arguments import NESTED, resolve_llm_args


def test_tensorrt_llms_names_are_taken() -> None:
    args, unsupported = resolve_llm_args(
        "m",
        {
            "max_batch_size": 8,
            "enable_chunked_prefill": True,
            "disable_overlap_scheduler": True,
            "kv_cache_config": {"tokens_per_block": 64, "enable_block_reuse": False},
            "cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 5000},
            "scheduler_config": {"waiting_queue_policy": "priority"},
        },
    )
    assert (args.max_batch_size, args.enable_chunked_prefill, args.disable_overlap_scheduler) == (8, True, True)
    assert args.kv_cache_config == KvCacheConfig(tokens_per_block=64, enable_block_reuse=False)
    assert (args.transport, args.cache_transceiver_config.kv_transfer_timeout_ms) == ("nixl", 5000)
    assert args.scheduler_config.waiting_queue_policy == "priority"
    assert unsupported == {}


def test_what_the_plan_takes_for_honoured_is_what_the_engine_has_arguments_for() -> None:
    given = {field.name for field in fields(LlmArgs)} | {"tokenizer"}  # which the LLM takes itself
    given -= {
        "deterministic",
        "grammar_tokenizer",
        "grammar_end_ids",
        "weight_group",
    }  # which are no engine config's: below
    honoured = {path for path, one in FIELDS.items() if isinstance(one, Honoured)}
    own = {f"{name}.{field.name}" for name, model in NESTED.items() for field in fields(model)}
    assert honoured == (given - NESTED.keys() - REFUSED.keys()) | own


@pytest.mark.parametrize("name", ["deterministic", "grammar_tokenizer", "grammar_end_ids", "weight_group"])
def test_what_the_llm_says_itself_is_no_field_of_an_engine_config(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        resolve_llm_args("m", {name: True})


def test_an_engine_is_not_deterministic_unless_it_is_asked_to_be() -> None:
    assert not resolve_llm_args("m", {})[0].deterministic


def test_a_field_without_which_answers_would_be_others_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="max_attention_window is \\[512\\]; expected none, the torch engine takes the windows of layers from",
    ):
        resolve_llm_args("m", {"kv_cache_config": {"max_attention_window": [512]}, "moe_config": {}})
    with pytest.raises(ValueError, match=r"lora_config is .*; load_format is 'DUMMY'; expected 'AUTO'"):
        resolve_llm_args("m", {"lora_config": {"lora_dir": ["a"]}, "load_format": "DUMMY"})


def test_a_known_field_without_effect_here_is_named() -> None:
    _, unsupported = resolve_llm_args(
        "m", {"enable_autotuner": True, "kv_cache_config": {"disk_cache_size": 5, "dtype": "auto"}}
    )
    assert unsupported.keys() == {"enable_autotuner", "kv_cache_config.disk_cache_size"}


def test_cuda_graphs_can_be_turned_off() -> None:
    assert resolve_llm_args("m", {"cuda_graph_config": None})[0].cuda_graph_config is None
    assert resolve_llm_args("m", {})[0].cuda_graph_config is not None


def test_config_objects_are_as_good_as_mappings() -> None:
    args, _ = resolve_llm_args("m", {"kv_cache_config": KvCacheConfig(max_tokens=64)})
    assert args.kv_cache_config.max_tokens == 64


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batchsize": 4}, "max_batchsize; did you mean max_batch_size"),
        ({"kv_cache_config": {"token_per_block": 4}}, "did you mean kv_cache_config.tokens_per_block"),
        ({"tensor_parallel_size": 9}, "tensor_parallel_size is 9; expected from 1 to 8"),
        (
            {"tensor_parallel_size": 2, "moe_expert_parallel_size": 4},
            "moe_expert_parallel_size is 4; expected a size with which moe_expert_parallel_size divides",
        ),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"max_num_tokens": "many"}, "max_num_tokens"),
        ({"max_seq_len": 0}, "max_seq_len is 0; expected at least 1"),
        ({"max_seq_len": 1}, "max_seq_len is 1; expected at least 2, a token of the prompt and one of the answer"),
        ({"max_stats_len": -1}, "max_stats_len is -1; expected at least 0"),
        ({"kv_cache_config": {"dtype": "nvfp4"}}, "kv_cache_config.dtype is 'nvfp4'; expected one of auto, float32"),
        ({"kv_cache_config": {"tokens_per_block": 3}}, "tokens_per_block is 3; expected a power of two"),
        ({"kv_cache_config": {"max_tokens": 16}}, "at least one block, 32 tokens"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "free_gpu_memory_fraction is 1.5"),
        ({"cache_transceiver_config": {"backend": "MPI"}}, "expected one of DEFAULT, NIXL, UCX"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve_llm_args("m", given)


ANY = (
    None, True, -1, 0, 1, 2, 3, 48, 64, 1 << 40, 0.0, 0.5, 1.5, 2.0, float("nan"), "", "auto", "fp8", "nvfp4",
    "float64", "DEFAULT", "MPI", "MOONCAKE", "fcfs", "priority", [], [0], [1, 2], ["a"], {}, {"a": 1},
)  # fmt: skip
PLAIN = [
    path
    for path in sorted({path for path, one in FIELDS.items() if isinstance(one, Honoured)} | SECTIONS)
    if path not in ("model", "tokenizer")  # no plan takes them
]


def nested(path: str, value: object) -> dict[str, Any]:
    section, _, name = path.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.mark.parametrize("path", PLAIN)
def test_what_the_engine_refuses_of_a_config_alone_the_plan_refuses_too(path: str) -> None:
    """And the other way round: what the plan takes has arguments, and a runner that takes them."""
    for value in ANY:
        values = nested(path, value)
        config = ResolvedEngineConfig("agg", values, "agg.yaml", ())
        planned = not any(found.severity == "error" for found in check_engine_configs({"agg": config}, engine="torch"))
        try:
            args, _ = resolve_llm_args("m", values)
            asked = runner_args(args)
            kv_dtype(asked.kv_dtype, None, compute_dtype(asked.dtype, "float32", is_gpu=False), None)
            taken = True
        except (ValueError, UsageError):
            taken = False
        assert taken == planned, (values, taken)


CONCURRENT_FIRST_USE = """
import sys, threading
from trtx.torch_engine.llmapi.arguments import resolve_llm_args
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
def resolve():
    barrier.wait()
    resolve_llm_args("m", {"kv_cache_config": {"max_tokens": 64}})
threads = [threading.Thread(target=resolve) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.slow
def test_several_engines_may_load_at_once_in_one_process() -> None:
    """Without the first use at import, about every second of these processes ended in a segmentation fault."""
    codes = [subprocess.run([sys.executable, "-c", CONCURRENT_FIRST_USE], check=False).returncode for _ in range(5)]
    assert codes == [0] * 5

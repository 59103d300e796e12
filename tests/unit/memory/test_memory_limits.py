"""Fields of an engine config that this arithmetic can't calculate with are named, whatever else let them through."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.memory import device_named, plan_memory


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_cache_config": 5}, ["kv_cache_config is 5", "a section"]),
        ({"cuda_graph_config": [1]}, ["cuda_graph_config is [1]", "a section"]),
        ({"cuda_graph_config": {"batch_sizes": ["x"]}}, ["cuda_graph_config.batch_sizes", "whole numbers"]),
        ({"max_batch_size": "four"}, ["max_batch_size is 'four'", "a whole number"]),
        ({"max_batch_size": 10**12}, ["max_batch_size is 1000000000000"]),
        ({"max_num_tokens": -1}, ["max_num_tokens is -1"]),
        ({"max_seq_len": True}, ["max_seq_len is True"]),
        ({"pipeline_parallel_size": 10**9}, ["pipeline_parallel_size is 1000000000"]),
        ({"kv_cache_config": {"free_gpu_memory_fraction": "x"}}, ["free_gpu_memory_fraction is 'x'", "from 0 to 1"]),
        ({"kv_cache_config": {"max_attention_window": 5}}, ["max_attention_window is 5", "a list"]),
        ({"kv_cache_config": {"tokens_per_block": [1]}}, ["tokens_per_block is [1]"]),
        ({"speculative_config": {"decoding_type": {}}}, ["speculative_config.decoding_type is {}", "text"]),
        ({"moe_config": {"load_balancer": {"num_slots": "x"}}}, ["moe_config.load_balancer.num_slots is 'x'"]),
    ],
)
def test_a_field_of_another_type_is_named(values: dict[str, Any], words: list[str]) -> None:
    path = resolve_checkpoint("synthetic:qwen3-8b").path
    with pytest.raises(UsageError) as refused:
        plan_memory(path, "agg", values, engine="tensorrt-llm", device=device_named("H100"))
    for word in words:
        assert word in str(refused.value)

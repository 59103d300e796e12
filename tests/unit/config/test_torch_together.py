"""Features of the torch engine that a config can't combine."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from trtx.config.torch_together import conflict
from trtx.torch_engine.llmapi.arguments import resolve_llm_args

FEATURES: dict[str, dict[str, Any]] = {
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "Draft_Target": {
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model": "m"}
    },
    "Eagle3": {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model": "m"}},
    "sleep_config": {"sleep_config": {}},
    "host_cache_size": {"kv_cache_config": {"host_cache_size": 1 << 20}},
}


@pytest.mark.parametrize(("first", "second"), list(combinations(FEATURES, 2)))
def test_any_two_of_them_are_taken(first: str, second: str) -> None:
    assert conflict({**FEATURES[first], **FEATURES[second]}) is None


def test_host_memory_for_blocks_that_are_never_reused_is_refused() -> None:
    values = {"kv_cache_config": {"host_cache_size": 1 << 20, "enable_block_reuse": False}}
    found = conflict(values)
    assert found is not None and "host_cache_size" in found and "enable_block_reuse" in found
    with pytest.raises(ValueError, match="the torch engine's arguments"):
        resolve_llm_args("m", values)


@pytest.mark.parametrize("name", FEATURES)
def test_each_of_them_is_taken_alone_and_beside_ngrams(name: str) -> None:
    ngram = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}}
    assert conflict(FEATURES[name]) is None
    assert conflict({**ngram, **FEATURES[name]}) is None

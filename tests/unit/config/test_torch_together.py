"""Features of the torch engine that a config can't combine."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from trtx.config.torch_together import conflict
from trtx.torch_engine.llmapi.arguments import resolve_llm_args

FEATURES: dict[str, dict[str, Any]] = {
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "draft model": {
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model": "m"}
    },
    "sleep_config": {"sleep_config": {}},
    "host_cache_size": {"kv_cache_config": {"host_cache_size": 1 << 20}},
}


APART = [("draft model", "host_cache_size")]


@pytest.mark.parametrize(("first", "second"), APART)
def test_two_of_them_are_refused_in_a_sentence_that_names_both(first: str, second: str) -> None:
    found = conflict({**FEATURES[first], **FEATURES[second]})
    assert found is not None and first in found and second in found
    with pytest.raises(ValueError, match="the torch engine's arguments"):
        resolve_llm_args("m", {**FEATURES[first], **FEATURES[second]})


@pytest.mark.parametrize(("first", "second"), [two for two in combinations(FEATURES, 2) if two not in APART])
def test_two_of_them_that_go_together_are_taken(first: str, second: str) -> None:
    assert conflict({**FEATURES[first], **FEATURES[second]}) is None


def test_an_engine_with_an_eagle_head_can_not_sleep() -> None:
    spec = {"decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model": "m"}
    found = conflict({"speculative_config": spec, "sleep_config": {}})
    assert found is not None and "Eagle3" in found and "sleep_config" in found


def test_host_memory_for_blocks_that_are_never_reused_is_refused() -> None:
    found = conflict({"kv_cache_config": {"host_cache_size": 1 << 20, "enable_block_reuse": False}})
    assert found is not None and "host_cache_size" in found and "enable_block_reuse" in found


@pytest.mark.parametrize("name", FEATURES)
def test_each_of_them_is_taken_alone_and_beside_ngrams(name: str) -> None:
    ngram = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}}
    assert conflict(FEATURES[name]) is None
    assert conflict({**ngram, **FEATURES[name]}) is None

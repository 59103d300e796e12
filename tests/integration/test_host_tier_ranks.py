"""Engines of two ranks with a host tier: answers and statistics, before and after a sleep, and a tier too large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.errors import UsageError
from trtx.torch_engine.llmapi import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SALTS = (None, "one", "two")
TURNS, TOKENS = 3, 120
TIER_BYTES = 16 << 20


def engine(*, pool_tokens: int, tier_bytes: int = 0, **more: Any) -> LLM:
    kv = {"tokens_per_block": 8, "max_tokens": pool_tokens, "host_cache_size": tier_bytes}
    return LLM(
        "synthetic:tiny", tensor_parallel_size=2, deterministic=True, max_batch_size=4, max_seq_len=512,
        kv_cache_config=kv, enable_iter_perf_stats=True, **more,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    """Of nine conversations that take turns; three begin with the same prompt under different salts."""
    histories = [[(at * 37 + number // 3 * 101) % 900 + 5 for at in range(TOKENS)] for number in range(9)]
    found: list[list[int]] = []
    for turn in range(TURNS):
        asked = [
            llm.generate_async(history, GREEDY, cache_salt=SALTS[number % 3])
            for number, history in enumerate(histories)
        ]  # fmt: skip
        for history, one in zip(histories, asked, strict=True):
            tokens = list(one.result(120).outputs[0].token_ids)
            found.append(tokens)
            history += [*tokens, 7 + turn]
    return found


def tier_of(llm: LLM) -> dict[str, Any]:
    return dict(llm.get_stats(2)[-1]["hostKvCacheStats"])


def test_small_pools_of_two_ranks_above_host_memory_answer_like_large_ones_and_after_a_sleep_too() -> None:
    with engine(pool_tokens=8192) as large:
        expected = answers(large)
    with engine(pool_tokens=600, tier_bytes=TIER_BYTES, sleep_config={}) as small:
        assert answers(small) == expected
        before = tier_of(small)
        assert before["reusedBlocks"] > 0
        # A token of tiny has 4 layers, k and v, and 32 float32 numbers in each of 2 heads, one of each rank.
        assert before["loadedBytes"] == before["reusedBlocks"] * 8 * 4 * 2 * 32 * 4 * 2
        small.release()
        small.resume()
        assert answers(small) == expected
        assert tier_of(small)["reusedBlocks"] > before["reusedBlocks"]


def test_memory_that_two_ranks_can_not_have_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"host_cache_size is 1048576\.00 GiB for each of 2 GPUs, 2097152\.00 GiB together"
    ):
        engine(pool_tokens=600, tier_bytes=1 << 50)


def test_a_refused_start_of_two_ranks_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the engine's process
    with pytest.raises(UsageError, match="host_cache_size is 5 bytes, and the smallest host tier"):
        engine(pool_tokens=600, tier_bytes=5)
    assert list(tmp_path.iterdir()) == []

"""KV handoff between engines of different numbers of ranks: the tokens of one engine, and every lease released."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams

pytestmark = pytest.mark.proof  # five engines, nine processes; make test has two of the pairs in test_ranks.py

MODEL = "synthetic:tiny-moe"
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 512, "kv_cache_config": {"max_tokens": 4096}}
HANDS_OFF: dict[str, Any] = {
    **LIMITS,
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 20_000},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "aggregated": LIMITS,
    "1": HANDS_OFF,
    "2": HANDS_OFF | {"tensor_parallel_size": 2},
    "2 experts": HANDS_OFF | {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2},
    "4": HANDS_OFF | {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2},
}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[(seed * 17 + at * 13) % 900 + 5 for at in range(length)] for seed, length in enumerate((7, 32, 150, 301))]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    with ThreadPoolExecutor() as pool:
        loading = {name: pool.submit(LLM, MODEL, **arguments) for name, arguments in ARGUMENTS.items()}
        found = {name: future.result() for name, future in loading.items()}
    yield found
    for engine in found.values():
        engine.shutdown()


def tokens(engine: LLM, prompt: list[int], handed: DisaggregatedParams | None = None) -> list[int]:
    return engine.generate_async(prompt, GREEDY, disaggregated_params=handed).result(timeout=60).outputs[0].token_ids


def context(prefill: LLM, prompt: list[int]) -> DisaggregatedParams:
    asked = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    output = prefill.generate_async(prompt, GREEDY, disaggregated_params=asked).result(timeout=60)
    handed = output.outputs[0].disaggregated_params
    assert handed is not None
    return replace(handed, request_type="generation_only")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("2", "1"), ("1", "2"), ("2", "2 experts"), ("4", "1"), ("1", "4"), ("4", "2"), ("2 experts", "4")],
)
def test_a_decode_engine_continues_what_ranks_of_another_number_began(
    engines: dict[str, LLM], prefill: str, decode: str
) -> None:
    for prompt in PROMPTS:
        own = [len(prompt), *prompt]  # no other pair has cached it
        own[1] = ord(prefill[0]) + 10 * ord(decode[0]) + len(decode)
        before = engines[decode].handoff_stats()
        assert tokens(engines[decode], own, context(engines[prefill], own)) == tokens(engines["aggregated"], own)
        after = engines[decode].handoff_stats()
        assert (after.reads - before.reads, after.recomputed - before.recomputed) == (1, 0)
    deadline = time.monotonic() + 10
    while engines[prefill].handoff_stats().leases and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engines[prefill].handoff_stats().leases == 0

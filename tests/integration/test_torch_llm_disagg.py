"""Two embedded engines and a real KV handoff over NIXL on loopback: disaggregated tokens equal aggregated ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, RequestError, SamplingParams

pytestmark = pytest.mark.proof  # three engines; make test has test_worker_torch.py

MODEL = "synthetic:tiny"
AGGREGATED: dict[str, Any] = {
    "max_batch_size": 16,
    "max_seq_len": 512,
    "kv_cache_config": {"max_tokens": 8192},
}
HANDS_OFF: dict[str, Any] = {
    **AGGREGATED,
    "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 20_000},
}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[LLM, LLM, LLM]]:
    """Aggregated, prefill, decode; loaded at once, as their NIXL takes seconds to import."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("UCX_NET_DEVICES", "lo")
        loading = [pool.submit(LLM, MODEL, **args) for args in (AGGREGATED, HANDS_OFF, HANDS_OFF)]
        aggregated, prefill, decode = (future.result() for future in loading)
    yield aggregated, prefill, decode
    for engine in (aggregated, prefill, decode):
        engine.shutdown()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + at * 13) % 1000 + 5 for at in range(length)]


def context(prefill: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> DisaggregatedParams:
    asked = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    output = prefill.generate_async(prompt, params, disaggregated_params=asked).result(timeout=60)
    handed = output.outputs[0].disaggregated_params
    assert handed is not None
    assert output.outputs[0].finish_reason == "length"
    assert handed.disagg_request_id == 1 << 41
    assert handed.first_gen_tokens == output.outputs[0].token_ids
    return replace(handed, request_type="generation_only")


def tokens(engine: LLM, prompt: list[int], handed: DisaggregatedParams | None = None) -> list[int]:
    return engine.generate_async(prompt, GREEDY, disaggregated_params=handed).result(timeout=60).outputs[0].token_ids


def until(holds: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


def test_a_pair_of_engines_says_what_one_engine_says(engines: tuple[LLM, LLM, LLM]) -> None:
    aggregated, prefill, decode = engines
    lengths = [1, 31, 32, 33, 64, 100, 300, 300, 310]
    block_bytes = 0
    for index, length in enumerate(lengths):  # the later ones find a prefix of their own on the decode side
        prompt = prompt_of(length, seed=index % 2)
        assert tokens(decode, prompt, context(prefill, prompt)) == tokens(aggregated, prompt), f"length {length}"
        block_bytes = block_bytes or decode.handoff_stats().bytes  # the first prompt is one block
    assert until(lambda: prefill.handoff_stats().leases == 0)
    stats = decode.handoff_stats()
    assert (stats.failed_reads, stats.recomputed) == (0, 0)
    assert 0 < stats.bytes < sum(-(-length // 32) for length in lengths) * block_bytes, "only missing blocks are read"

    many = [prompt_of(20 + 7 * index, seed=index) for index in range(12)]
    handed = [context(prefill, prompt) for prompt in many]
    outputs = [decode.generate_async(p, GREEDY, disaggregated_params=h) for p, h in zip(many, handed, strict=True)]
    assert [o.result(timeout=60).outputs[0].token_ids for o in outputs] == [tokens(aggregated, p) for p in many]

    # A decode request that ends before it reads still gives the prefill side its blocks back.
    waiting = decode.generate_async(many[0], GREEDY, disaggregated_params=context(prefill, many[0]))
    waiting.abort()
    waiting.result(timeout=60)
    refused = decode.generate_async([5] * 600, GREEDY, disaggregated_params=context(prefill, prompt_of(40, seed=5)))
    with pytest.raises(RequestError, match="600 tokens"):
        refused.result(timeout=60)
    assert until(lambda: prefill.handoff_stats().leases == 0)
    assert prefill.handoff_stats().expired_leases == 0


def test_a_dead_prefill_engine_costs_a_recomputation_and_no_request(engines: tuple[LLM, LLM, LLM]) -> None:
    """The last one: the prefill engine is gone afterwards."""
    aggregated, prefill, decode = engines
    prompt = prompt_of(100, seed=2)  # which decode has nothing of
    warm = prompt_of(40, seed=3)
    assert tokens(decode, warm, context(prefill, warm)) == tokens(aggregated, warm)
    handed = context(prefill, prompt)
    os.kill(prefill.engine_pid, signal.SIGKILL)
    assert until(lambda: not prefill._check_health())
    assert tokens(decode, prompt, handed) == tokens(aggregated, prompt)
    assert decode.handoff_stats().recomputed == 1

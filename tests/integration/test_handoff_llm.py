"""What a lease that ends too early costs: a recomputation on the decode engine, and no request."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams

pytestmark = pytest.mark.proof

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def _args(timeout_ms: int) -> dict[str, Any]:
    return {
        "max_batch_size": 8,
        "max_seq_len": 256,
        "kv_cache_config": {"max_tokens": 2048},
        "cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": timeout_ms},
    }


def test_an_expired_lease_gives_its_blocks_back_and_decode_computes_the_prompt_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(LLM, "synthetic:tiny", **_args(timeout_ms)) for timeout_ms in (200, 60_000)]
        prefill, decode = (future.result() for future in loading)
    with prefill, decode:
        prompt = [at * 13 % 1000 + 5 for at in range(100)]
        asked = DisaggregatedParams(request_type="context_only")
        handed = prefill.generate_async(prompt, GREEDY, disaggregated_params=asked).result(timeout=60)
        params = handed.disaggregated_params
        assert params is not None
        deadline = time.monotonic() + 30
        while prefill.handoff_stats().expired_leases == 0:
            assert time.monotonic() < deadline, "the lease did not expire within 30 s"
            time.sleep(0.02)
        generation = replace(params, request_type="generation_only")
        found = decode.generate_async(prompt, GREEDY, disaggregated_params=generation).result(timeout=60)
        stats = decode.handoff_stats()
        assert (stats.recomputed, stats.reads) == (1, 0)
        assert prefill.handoff_stats().leases == 0
        expected = prefill.generate_async(prompt, GREEDY).result(timeout=60)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(found.outputs[0].token_ids) == GREEDY.max_tokens

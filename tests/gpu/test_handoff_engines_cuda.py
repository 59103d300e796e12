"""Two engines on GPUs: a prompt that one computed is continued by the other, from KV that it read directly."""

from __future__ import annotations

import os

import pytest
import torch

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def engine(gpu: int, monkeypatch: pytest.MonkeyPatch) -> LLM:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible[gpu % len(visible)])
        return LLM(
            "synthetic:tiny", dtype="float32", max_batch_size=8, max_seq_len=512, kv_cache_config={"max_tokens": 8192},
            cache_transceiver_config={"backend": "NIXL"},
        )  # fmt: skip


def test_tokens_after_a_handoff_are_those_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_TOPOLOGY", f"test-{os.getpid()}")
    with engine(0, monkeypatch) as prefill, engine(1, monkeypatch) as decode:
        asked = DisaggregatedParams(request_type="context_only")
        for count, length in enumerate((5, 33, 100, 400)):
            prompt = [(at * 31 + length) % 3000 + 5 for at in range(length)]
            params = prefill.generate_async(prompt, GREEDY, disaggregated_params=asked).result(60).disaggregated_params
            assert params is not None and params.opaque_state is not None
            exported = codec.decode(params.opaque_state)
            assert exported.direct is not None and exported.direct.memory == "cuda"
            params.request_type = "generation_only"
            handed = decode.generate_async(prompt, GREEDY, disaggregated_params=params).result(60).outputs[0]
            assert handed.token_ids == prefill.generate_async(prompt, GREEDY).result(60).outputs[0].token_ids
            stats = decode.handoff_stats()
            assert (stats.reads, stats.recomputed, stats.failed_reads) == (count + 1, 0, 0)

"""Engines on an FP8 export with a float8 KV cache: the same tokens however they are reached, and who refuses whom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from transformers import AutoModelForCausalLM

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine import LLM, DisaggregatedParams, RequestError, SamplingParams

ROOMY: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_batch_size": 16, "max_seq_len": 256, "kv_cache_config": {"max_tokens": 8192},
}  # fmt: skip
CRAMPED: dict[str, Any] = {**ROOMY, "enable_chunked_prefill": True, "max_num_tokens": 48}
HANDS_OFF: dict[str, Any] = {**ROOMY, "cache_transceiver_config": {"backend": "NIXL"}}
WIDE: dict[str, Any] = {**HANDS_OFF, "kv_cache_config": {"max_tokens": 8192, "dtype": "bfloat16"}}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[(index * 19 + at * 13 + 8) % 900 + 5 for at in range(1 + (index * 37) % 200)] for index in range(16)]


@pytest.fixture(scope="module")
def export_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = resolve_checkpoint("synthetic:tiny-trained").path
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    directory = tmp_path_factory.mktemp("fp8")
    export(model, "FP8", directory, kv_scales=True)
    return directory


@pytest.fixture(scope="module")
def engines(export_directory: Path) -> Iterator[list[LLM]]:
    """Aggregated; chunked; prefill; decode; decode with a bfloat16 cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ThreadPoolExecutor() as pool:
            loading = [
                pool.submit(LLM, str(export_directory), **args) for args in (ROOMY, CRAMPED, HANDS_OFF, HANDS_OFF, WIDE)
            ]
            loaded = [future.result() for future in loading]
        yield loaded
        for engine in loaded:
            engine.shutdown()


def tokens(engine: LLM, handed: list[DisaggregatedParams] | None = None) -> list[list[int]]:
    outputs = [
        engine.generate_async(prompt, GREEDY, disaggregated_params=handed[index] if handed else None)
        for index, prompt in enumerate(PROMPTS)
    ]
    return [output.result(timeout=120).outputs[0].token_ids for output in outputs]


def handed_by(prefill: LLM) -> list[DisaggregatedParams]:
    asked = DisaggregatedParams(request_type="context_only")
    outputs = [prefill.generate_async(prompt, GREEDY, disaggregated_params=asked) for prompt in PROMPTS]
    found = [output.result(timeout=120).outputs[0].disaggregated_params for output in outputs]
    return [replace(params, request_type="generation_only") for params in found if params is not None]


def test_float8_kv_gives_the_same_tokens_aggregated_chunked_cached_and_handed_over(engines: list[LLM]) -> None:
    aggregated, chunked, prefill, decode, _ = engines
    expected = tokens(aggregated)
    assert tokens(aggregated) == expected, "every prefix cached"
    assert tokens(chunked) == expected, "chunked prefill"
    assert tokens(decode, handed_by(prefill)) == expected, "disaggregated"
    stats = decode.handoff_stats()
    assert stats.bytes > 0 and stats.recomputed == stats.failed_reads == 0
    assert stats.bytes % (4 * 2 * 32 * 2 * 64) == 0  # layers, k and v, tokens, heads, head_dim: one byte each


def test_a_bfloat16_cache_refuses_a_float8_one_and_both_are_named(engines: list[LLM]) -> None:
    _, _, prefill, _, wide = engines
    asked = DisaggregatedParams(request_type="context_only")
    handed = prefill.generate_async(PROMPTS[3], GREEDY, disaggregated_params=asked).result(timeout=60)
    params = handed.outputs[0].disaggregated_params
    assert params is not None
    with pytest.raises(RequestError, match="dtype is 'float8_e4m3fn' on prefill, 'bfloat16' on decode"):
        wide.generate_async(
            PROMPTS[3], GREEDY, disaggregated_params=replace(params, request_type="generation_only")
        ).result(timeout=60)


def test_prompt_logprobs_come_from_the_quantized_model(engines: list[LLM]) -> None:
    output = engines[0].generate(PROMPTS[5], SamplingParams(max_tokens=1, prompt_logprobs=0)).outputs[0]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPTS[5]) - 1

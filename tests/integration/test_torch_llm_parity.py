"""Greedy tokens are the same whichever way the engine takes to them, and the same as transformers' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from split_experts import split_experts

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams

pytestmark = pytest.mark.proof  # four engines; make test has test_torch_llm.py and test_worker_torch.py

SPLIT = "trained experts"  # of split_experts.py
MODELS = ["synthetic:tiny", "synthetic:tiny-moe", "synthetic:tiny-gpt-oss", SPLIT]
LEAST_MARGIN = {"synthetic:tiny": 1e-4, "synthetic:tiny-moe": 1e-4, "synthetic:tiny-gpt-oss": 1e-4, SPLIT: 3e-5}
COUNT = {"synthetic:tiny": 64, "synthetic:tiny-moe": 64, "synthetic:tiny-gpt-oss": 64, SPLIT: 500}
AT_ONCE = 64
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
ROOMY: dict[str, Any] = {
    "dtype": "float32",  # as transformers below, whatever the processor
    "max_batch_size": 32,
    "max_seq_len": 256,
    "kv_cache_config": {"max_tokens": 16_384},
}
CRAMPED: dict[str, Any] = {
    **ROOMY,
    "enable_chunked_prefill": True,
    "max_num_tokens": 64,
    "kv_cache_config": {"max_tokens": 512},
    "enable_iter_perf_stats": True,
}
HANDS_OFF: dict[str, Any] = {**ROOMY, "cache_transceiver_config": {"backend": "NIXL"}}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, tmp_path: Path) -> str:
    return str(split_experts(tmp_path / "split")) if name == SPLIT else name


@pytest.fixture
def engines(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LLM]]:
    """Aggregated; with chunks and a pool that preempts; prefill; decode."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(LLM, model, **args) for args in (ROOMY, CRAMPED, HANDS_OFF, HANDS_OFF)]
        loaded = [future.result() for future in loading]
    yield loaded
    for engine in loaded:
        engine.shutdown()


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    """1 to 200 tokens; every third continues a beginning that others share."""
    ids = min(1500, vocab_size - 5)
    return [
        [((0 if index % 3 else index) * 19 + at * 13 + 8) % ids + 5 for at in range(1 + (index * 37) % 200)]
        for index in range(count)
    ]


def _transformers(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> tuple[list[list[int]], float]:
    """What transformers in float32 finds best at each step of each answer, and the smallest margin to the second best.

    One pass over a prompt and its answer: the tokens are those that greedy ``generate`` would give exactly if they
    are the answer, since then every step had the same tokens before it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    tokens, margin = [], float("inf")
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        tokens.append(best.indices[:, 0].tolist())
        margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
    return tokens, margin


def _all(engine: LLM, prompts: list[list[int]], handed: list[DisaggregatedParams] | None = None) -> list[list[int]]:
    outputs = [
        engine.generate_async(prompt, GREEDY, disaggregated_params=handed[index] if handed else None)
        for index, prompt in enumerate(prompts)
    ]
    return [output.result(timeout=300).outputs[0].token_ids for output in outputs]


def _handed(prefill: LLM, prompts: list[list[int]]) -> list[DisaggregatedParams]:
    asked = DisaggregatedParams(request_type="context_only")
    outputs = [prefill.generate_async(prompt, GREEDY, disaggregated_params=asked) for prompt in prompts]
    found = [output.result(timeout=300).outputs[0].disaggregated_params for output in outputs]
    return [replace(params, request_type="generation_only") for params in found if params is not None]


def _disaggregated(prefill: LLM, decode: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Hands over so few prompts at once that no lease ends before its read."""
    found: list[list[int]] = []
    for begin in range(0, len(prompts), AT_ONCE):
        part = prompts[begin : begin + AT_ONCE]
        found += _all(decode, part, _handed(prefill, part))
    return found


def test_every_way_to_the_tokens_gives_the_same_tokens_as_transformers(
    name: str, model: str, engines: list[LLM], record_property: Any
) -> None:
    aggregated, cramped, prefill, decode = engines
    path = resolve_checkpoint(model).path
    prompts = _prompts(COUNT[name], json.loads((path / "config.json").read_text())["vocab_size"])
    expected = _all(aggregated, prompts)
    assert {len(tokens) for tokens in expected} == {GREEDY.max_tokens}
    found, margin = _transformers(path, prompts, expected)
    assert found == expected, "aggregated"
    record_property("smallest top-2 margin", margin)
    print(f"smallest top-2 margin of {len(prompts) * GREEDY.max_tokens} steps: {margin:.2e}")
    assert margin > LEAST_MARGIN[name], "two logits are so close that rounding decides; other prompts would prove more"

    assert _all(aggregated, prompts) == expected, "aggregated, every prefix cached"
    preempted = 0
    for _ in range(4):  # how many are preempted depends on the steps in which the prompts arrive
        assert _all(cramped, prompts) == expected, "chunked prefill and preemption"
        preempted = cramped.get_stats(timeout=5)[-1]["numPreemptions"]
        if preempted:
            break
    assert preempted > 0, "nothing was preempted"

    assert _disaggregated(prefill, decode, prompts) == expected, "disaggregated"
    first = decode.handoff_stats()
    assert _disaggregated(prefill, decode, prompts) == expected, "disaggregated, with prefix hits"
    second = decode.handoff_stats()
    assert second.bytes - first.bytes < first.bytes, "the second time some of the blocks were there"
    assert second.recomputed == second.failed_reads == 0

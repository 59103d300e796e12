"""Sleep and wake on a GPU: the memory goes, and captured graphs work at the same addresses afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runner_player import Player, build, random_prompt, save

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams
from trtx.torch_engine.messages import MEMORY_TAGS
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TOKENS_PER_BLOCK = 16
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def runner(model_dir: Path, **changes: Any) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=model_dir, tokens_per_block=TOKENS_PER_BLOCK, max_tokens=1 << 18, max_batch_size=16, sleeps=True,
            **changes,
        )
    )  # fmt: skip


def tokens(one: TorchRunner) -> list[list[int]]:
    player = Player(one)
    return player.finish([player.add(random_prompt(length, length), room=12) for length in (5, 40, 130)], 12)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_captured_graphs_give_the_same_tokens_after_each_of_three_sleeps(checkpoint: Path, keeps_weights: bool) -> None:
    one = runner(checkpoint, keeps_weights=keeps_weights)
    expected = tokens(one)
    address = one.pool.data_ptr()
    for _ in range(3):
        before, _ = torch.cuda.mem_get_info()
        one.release(MEMORY_TAGS)
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - before >= one.pool.numel() * one.pool.element_size()
        one.restore(MEMORY_TAGS)
        assert one.pool.data_ptr() == address
        assert not one.pool.any()
        assert tokens(one) == expected
    assert one.graph_misses == 0
    one.close()


def test_graphs_read_new_weights_that_take_the_place_of_the_old_ones(checkpoint: Path, tmp_path: Path) -> None:
    model = build("qwen3")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    other = save(model, tmp_path / "other")
    fresh = runner(other)
    expected = tokens(fresh)
    fresh.close()
    one = runner(checkpoint)
    first = tokens(one)
    one.update_weights(other)
    assert tokens(one) == expected
    one.release(MEMORY_TAGS)
    one.update_weights(checkpoint)
    one.restore(MEMORY_TAGS)
    assert tokens(one) == first
    one.close()


def test_kv_is_handed_off_before_and_after_both_engines_slept() -> None:
    config: dict[str, Any] = {
        "kv_cache_config": {"tokens_per_block": TOKENS_PER_BLOCK, "max_tokens": 8192}, "max_seq_len": 512,
        "cache_transceiver_config": {"backend": "NIXL"}, "sleep_config": {},
    }  # fmt: skip
    prompt = [at * 31 % 3000 + 5 for at in range(300)]
    asked = DisaggregatedParams(request_type="context_only")
    with LLM("synthetic:tiny", **config) as prefill, LLM("synthetic:tiny", **config) as decode:
        answers = []
        for number in range(3):
            params = prefill.generate_async(prompt, GREEDY, disaggregated_params=asked).result(60).disaggregated_params
            assert params is not None
            params.request_type = "generation_only"
            answers.append(decode.generate_async(prompt, GREEDY, disaggregated_params=params).result(60).outputs[0])
            stats = decode.handoff_stats()
            assert (stats.reads, stats.recomputed, stats.failed_reads) == (number + 1, 0, 0)
            prefill.release()
            decode.release()
            decode.resume()
            prefill.resume()
        assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids

"""The host tier on a GPU: copies on their own streams change no bit of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from returning import assert_same, conversations, play
from runner_player import build, save

from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_small_pool_above_pinned_memory_answers_like_a_large_one(kv_dtype: str, tmp_path: Path) -> None:
    if kv_dtype == "fp8" and not HAS_FP8:
        pytest.skip("needs FP8")
    large, small, requests = 40 * 16 + 40, 5 * 12, 400
    shape = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512, "head_dim": 64}
    runner = create_runner(
        RunnerArgs(
            model_dir=save(build("qwen3", **shape), tmp_path), device="cuda", dtype="bfloat16", tokens_per_block=8,
            num_blocks=2 * large, max_batch_size=5, deterministic=True, kv_dtype=kv_dtype,
        )
    )  # fmt: skip
    expected = conversations(3, 40, requests)
    play(runner, expected, seed=1, num_blocks=2 * large, on_step=lambda core: None)
    for overlap in (True, False):
        found = conversations(3, 40, requests)
        copies = create_host_copies([runner.pool], large * runner.geometry.block_bytes, 1)
        core = play(runner, found, seed=2, num_blocks=small, copies=copies, overlap=overlap)
        assert_same(found, expected)
        assert core.tier is not None and core.tier.counters.loaded > requests
        assert core.tier.counters.loaded_seconds > 0
        copies.close()
    runner.close()


def test_blocks_come_back_as_they_were() -> None:
    pool = torch.randint(0, 255, (64, 2, 3, 2, 16, 64), dtype=torch.uint8, device="cuda")
    before = pool.clone()
    copies = create_host_copies([pool], 40 * pool[0].numel(), 1)
    order = torch.randperm(64)[:40].tolist()
    stored = copies.store(order, list(range(40)))
    copies.hold_steps()
    pool[order] = 0
    back = copies.load(list(range(40)), order, after_stores=True)
    torch.cuda.synchronize()
    assert stored.is_done() and back.is_done()
    assert torch.equal(pool, before)
    copies.close()

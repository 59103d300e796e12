"""The host tier with real KV: returning conversations get the answers of a pool that holds them all, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from returning import assert_same, conversations, play
from runner_player import build, save

from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, runs

SIZE = 8


@pytest.mark.parametrize(
    ("family", "kv_dtype", "overlap"), [("qwen3", "auto", True), ("qwen3", "fp8", False), ("qwen3", "auto", False)]
)
def test_a_small_pool_above_host_memory_answers_like_a_large_one(
    family: str, kv_dtype: str, overlap: bool, tmp_path: Path
) -> None:
    _compare(tmp_path, family, kv_dtype, overlap, count=20, requests=100, small=60)


@pytest.mark.proof
@pytest.mark.parametrize(("kv_dtype", "overlap"), [("auto", True), ("auto", False), ("fp8", True)])
def test_five_thousand_requests_of_four_hundred_conversations(kv_dtype: str, overlap: bool, tmp_path: Path) -> None:
    """The pool holds about 40 of them."""
    _compare(tmp_path, "qwen3", kv_dtype, overlap, count=400, requests=5000, small=40 * 12)


def _compare(
    directory: Path, family: str, kv_dtype: str, overlap: bool, *, count: int, requests: int, small: int
) -> None:
    model = build(family)
    large = count * 16 + 40
    runner = create_runner(
        RunnerArgs(
            model_dir=save(model, directory), device="cpu", tokens_per_block=SIZE, num_blocks=4 * large,
            max_batch_size=5, deterministic=True, kv_dtype=kv_dtype, cpu_threads=1,
        )
    )  # fmt: skip
    groups = len(runner.geometry.groups)
    expected = conversations(3, count, requests)
    play(runner, expected, seed=1, num_blocks=4 * large, overlap=overlap, on_step=lambda core: None)
    found = conversations(3, count, requests)
    copies = create_host_copies(runner.pool, large * groups * runner.geometry.block_bytes, groups)
    core = play(runner, found, seed=2, num_blocks=small * groups, copies=copies, overlap=overlap)
    assert_same(found, expected)
    assert core.tier is not None and core.tier.counters.loaded > requests
    copies.close()


def test_runs_join_blocks_that_follow_each_other_on_both_sides() -> None:
    assert list(runs([3, 1, 2, 9], [13, 11, 12, 14])) == [(1, 11, 3), (9, 14, 1)]

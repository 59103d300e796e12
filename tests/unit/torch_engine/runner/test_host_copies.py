"""The host tier with real KV: returning conversations get the answers of a pool that holds them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from returning import Case, Tiered, compare

from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of, runs

PLAIN = Case()
FP8 = Case(kv_dtype="fp8", overlap=False)
WINDOWS = Case(
    "qwen2",
    (("num_hidden_layers", 4), ("use_sliding_window", True), ("sliding_window", 13),
     ("layer_types", ("sliding_attention", "full_attention") * 2)),
    host_share=3,  # the tier evicts too
)  # fmt: skip
SINKS = Case("gpt_oss", host_share=3)
DRAFTS = [Case(shape=(("num_hidden_layers", 4),), draft=kind) for kind in ("Eagle3", "Draft_Target")]
PREEMPTED = replace(FP8, overlap=True, batch=64, longest_answer=24)


def one_rank(args: RunnerArgs) -> Tiered:
    runner = create_runner(args)
    groups = len(runner.geometry.groups)
    return Tiered(runner, lambda num_bytes: create_host_copies(pools_of(runner), num_bytes, groups), runner.close)


@pytest.mark.parametrize(
    "case",
    [PLAIN, FP8, WINDOWS, pytest.param(SINKS, marks=pytest.mark.proof)],
    ids=["plain", "fp8", "windows", "sinks"],
)
def test_a_small_pool_above_host_memory_answers_like_a_large_one(case: Case, tmp_path: Path) -> None:
    compare(tmp_path, case, one_rank, count=20, requests=100, share=4)


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAFTS, ids=lambda case: case.draft)
def test_five_hundred_requests_with_a_draft_model_get_the_bits_of_a_large_pool_without_one(
    case: Case, tmp_path: Path
) -> None:
    compare(tmp_path, case, one_rank, count=50, requests=500, share=5)


@pytest.mark.proof
@pytest.mark.parametrize(
    "case",
    [PLAIN, PREEMPTED, WINDOWS],
    ids=["plain", "fp8-preempted", "windows-evicting"],
)
def test_five_thousand_requests_of_four_hundred_conversations(case: Case, tmp_path: Path) -> None:
    """The pool holds about 40 of them, or 10 so that sequences are preempted."""
    compare(tmp_path, case, one_rank, count=400, requests=5000, share=40 if case.preempts else 10)


def test_runs_join_blocks_that_follow_each_other_on_both_sides() -> None:
    assert list(runs([3, 1, 2, 9], [13, 11, 12, 14])) == [(1, 11, 3), (9, 14, 1)]

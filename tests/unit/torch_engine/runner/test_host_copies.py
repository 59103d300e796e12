"""The host tier with real KV: returning conversations get the answers of a pool that holds them all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from returning import assert_same, conversations, play
from runner_player import build, save

from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, runs

SIZE = 8
BLOCKS_EACH = 12  # of a conversation, about


@dataclass(frozen=True)
class Case:
    """An engine with a host tier, and its load."""

    family: str = "qwen3"
    shape: tuple[tuple[str, Any], ...] = ()
    kv_dtype: str = "auto"
    overlap: bool = True
    batch: int = 5
    longest_answer: int = 5
    host_share: int = 1  # the tier holds one in so many conversations

    @property
    def preempts(self) -> bool:
        """Its sequences outgrow the pool."""
        return self.batch > 5


PLAIN = Case()
FP8 = Case(kv_dtype="fp8", overlap=False)
WINDOWS = Case(
    "qwen2",
    (("num_hidden_layers", 4), ("use_sliding_window", True), ("sliding_window", 13),
     ("layer_types", ("sliding_attention", "full_attention") * 2)),
    host_share=3,  # the tier evicts too
)  # fmt: skip
SINKS = Case("gpt_oss", host_share=3)
PREEMPTED = replace(FP8, overlap=True, batch=64, longest_answer=24)


@pytest.mark.parametrize(
    "case",
    [PLAIN, FP8, WINDOWS, pytest.param(SINKS, marks=pytest.mark.proof)],
    ids=["plain", "fp8", "windows", "sinks"],
)
def test_a_small_pool_above_host_memory_answers_like_a_large_one(case: Case, tmp_path: Path) -> None:
    _compare(tmp_path, case, count=20, requests=100, share=4)


@pytest.mark.proof
@pytest.mark.parametrize(
    "case",
    [PLAIN, PREEMPTED, WINDOWS],
    ids=["plain", "fp8-preempted", "windows-evicting"],
)
def test_five_thousand_requests_of_four_hundred_conversations(case: Case, tmp_path: Path) -> None:
    """The pool holds about 40 of them, or 10 so that sequences are preempted."""
    _compare(tmp_path, case, count=400, requests=5000, share=40 if case.preempts else 10)


def _compare(directory: Path, case: Case, *, count: int, requests: int, share: int) -> None:
    model = build(case.family, **{name: list(v) if isinstance(v, tuple) else v for name, v in case.shape})
    small, large = count * BLOCKS_EACH // share, count * 32
    runner = create_runner(
        RunnerArgs(
            model_dir=save(model, directory), device="cpu", tokens_per_block=SIZE, num_blocks=2 * large,
            max_batch_size=case.batch, deterministic=True, kv_dtype=case.kv_dtype, cpu_threads=1,
            max_num_tokens=16 * case.batch,
        )
    )  # fmt: skip
    groups = len(runner.geometry.groups)
    served = partial(
        play, runner, overlap=case.overlap, batch=case.batch, waiting=case.batch + 3, step_tokens=16 * case.batch
    )
    expected = conversations(3, count, requests, longest_answer=case.longest_answer)
    served(expected, seed=1, num_blocks=groups * large, on_step=lambda core: None)
    found = conversations(3, count, requests, longest_answer=case.longest_answer)
    host = count * BLOCKS_EACH // case.host_share if case.host_share > 1 else large
    copies = create_host_copies(runner.pool, host * groups * runner.geometry.block_bytes, groups)
    core = served(found, seed=2, num_blocks=small * groups, copies=copies)
    assert_same(found, expected)
    assert core.tier is not None
    tier, cancelled = core.tier.counters, sum(len(talk.cancelled) for talk in found)
    print(f"{requests} requests, {cancelled} cancelled, {core.scheduler.num_preemptions} preemptions; blocks: "
          f"{tier.stored} stored, {tier.loaded} loaded, {tier.evicted} evicted, {tier.dropped} dropped")  # fmt: skip
    assert tier.loaded > requests
    assert cancelled
    assert bool(tier.evicted) == (case.host_share > 1)
    assert bool(core.scheduler.num_preemptions) == case.preempts
    copies.close()


def test_runs_join_blocks_that_follow_each_other_on_both_sides() -> None:
    assert list(runs([3, 1, 2, 9], [13, 11, 12, 14])) == [(1, 11, 3), (9, 14, 1)]

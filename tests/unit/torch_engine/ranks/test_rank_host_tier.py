"""The host tier of two ranks over gloo: returning conversations get the answers of a pool that holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from returning import Case, Tiered, compare
from runner_player import build, save

from trtx.errors import UsageError
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs

pytestmark = pytest.mark.slow


def unexpected(error: Exception) -> None:
    print(error)  # the test then fails at its time limit, with this in its output


def two_ranks(args: RunnerArgs) -> Tiered:
    runner = create_ranked_runner(args, start_ranks(2, unexpected))
    return Tiered(runner, runner.create_host_copies, runner.close)


@pytest.mark.parametrize(
    ("case", "count", "requests", "share"),
    [
        (Case(), 20, 100, 4),
        (Case(shape=(("num_hidden_layers", 4),), draft="Eagle3"), 20, 100, 4),
        (Case(kv_dtype="fp8", batch=64, longest_answer=24), 40, 160, 4),
        pytest.param(Case("qwen3_moe", overlap=False, host_share=3), 20, 100, 4, marks=pytest.mark.proof),
        pytest.param(Case(), 400, 5000, 10, marks=pytest.mark.proof),
    ],
    ids=["plain", "eagle", "fp8-preempted", "experts-evicting", "five-thousand"],
)
def test_small_pools_of_two_ranks_above_host_memory_answer_like_large_ones(
    case: Case, count: int, requests: int, share: int, tmp_path: Path
) -> None:
    compare(tmp_path, case, two_ranks, count=count, requests=requests, share=share)


def test_a_rank_copies_blocks_of_its_own_heads_and_too_little_memory_is_refused(tmp_path: Path) -> None:
    args = RunnerArgs(
        model_dir=save(build("qwen3"), tmp_path), device="cpu", tokens_per_block=8, num_blocks=8, max_batch_size=2
    )
    tiered = two_ranks(args)
    block_bytes = tiered.runner.geometry.block_bytes
    assert block_bytes == 3 * 1 * 2 * 8 * 24 * 4, "layers, heads of a rank, k and v, tokens, numbers, bytes"
    with pytest.raises(UsageError, match=f"the smallest host tier of this model has {block_bytes} bytes"):
        tiered.new_copies(block_bytes - 1)
    copies = tiered.new_copies(2 * block_bytes)
    assert (copies.num_blocks, copies.bytes_of_all_ranks, copies.block_bytes) == (2, 2 * block_bytes, block_bytes)
    copies.close()
    tiered.close()

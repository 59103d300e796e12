"""Ranks over gloo on a CPU: the tokens of one rank, whatever is asked, and a death that is noticed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from engine_player import assert_equal, served, workload
from examples import first_of
from guided_player import guided_workload, served_guided
from processed_player import processed_workload, served_processed
from quantized_export import export
from runner_player import build, save
from scored_prompt import logprobs_of, reference

from trtx.errors import UsageError
from trtx.torch_engine.core.speculation.drafters import NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.sources import LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs, create_runner

pytestmark = pytest.mark.slow

EXPORTERS = {"FP8_BLOCK_SCALES": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "compressed-tensors"}


def new_args(
    family: str, directory: Path, *, deterministic: bool = False, expert_ranks: int = 1, **changes: Any
) -> RunnerArgs:
    """``changes``: fields of the model's config."""
    return RunnerArgs(
        model_dir=save(build(family, **changes), directory), device="cpu", dtype="float32", tokens_per_block=8,
        num_blocks=11, max_batch_size=5, guided=True, max_draft_len=3, cpu_threads=1, deterministic=deterministic,
        moe_expert_parallel_size=expert_ranks,
    )  # fmt: skip


def unexpected(error: Exception) -> None:
    print(error)  # the test then fails at its time limit, with this in its output


def assert_tokens_of_one_rank(args: RunnerArgs, size: int) -> None:
    ranked = create_ranked_runner(args, start_ranks(size, unexpected))
    try:
        wishes = workload(1, count=6)
        expected, _ = served(create_runner(args), wishes, overlap=True)
        assert_equal(served(ranked, wishes, overlap=True)[0], expected, wishes)
    finally:
        ranked.close()


@pytest.mark.parametrize(
    ("family", "size", "kv_heads"),
    first_of(1, [("qwen2", 2, 1), ("qwen2", 4, 2), ("llama", 4, 2)]),  # test_rank_shares.py has four ranks' shares
)
def test_biases_are_added_once_a_tied_head_is_split_and_ranks_share_kv_heads(
    family: str, size: int, kv_heads: int, tmp_path: Path
) -> None:
    args = new_args(family, tmp_path, num_key_value_heads=kv_heads, tie_word_embeddings=True)
    assert_tokens_of_one_rank(args, size)


@pytest.mark.parametrize(
    ("size", "expert_ranks"),
    [
        pytest.param(2, 1, marks=pytest.mark.proof),
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.proof),
        pytest.param(4, 4, marks=pytest.mark.proof),
        pytest.param(4, 2, marks=pytest.mark.proof),
    ],
)
def test_ranks_give_the_tokens_of_one_rank_whatever_is_asked(size: int, expert_ranks: int, tmp_path: Path) -> None:
    args = new_args("qwen3_moe", tmp_path, expert_ranks=expert_ranks)
    one, ranked = create_runner(args), create_ranked_runner(args, start_ranks(size, unexpected))
    try:
        for seed in (0, 1):
            wishes = workload(seed)
            expected, _ = served(one, wishes, overlap=False)
            found, paused = served(ranked, wishes, overlap=bool(seed))
            assert_equal(found, expected, wishes)
            assert paused, "nothing was preempted"
        drafter = NGramDrafter(max_matching_ngram_size=2, is_keep_all=True, is_use_oldest=True, is_public_pool=True)
        drafts = Speculation(LookupDrafts(drafter), DraftLengths(3, schedule={5: 3}), is_asynchronous=False)
        assert_equal(served(ranked, wishes, overlap=True, speculation=drafts)[0], expected, wishes)
        assert drafts.take_counts() is not None
        wishes, hooks = processed_workload(2)
        expected, _ = served_processed(one, wishes, hooks, overlap=False)
        assert_equal(served_processed(ranked, wishes, hooks, overlap=True)[0], expected, wishes)
        wishes = guided_workload(3)
        expected = served_guided(one, wishes, overlap=False)
        assert_equal(served_guided(ranked, wishes, overlap=True), expected, wishes)
    finally:
        ranked.close()


@pytest.mark.parametrize(("size", "expert_ranks"), [pytest.param(2, 1, marks=pytest.mark.proof), (2, 2)])
def test_ranks_split_sinks_and_add_the_experts_biases_once(size: int, expert_ranks: int, tmp_path: Path) -> None:
    args = replace(new_args("gpt_oss", tmp_path, expert_ranks=expert_ranks), num_blocks=80)
    assert_tokens_of_one_rank(args, size)


@pytest.mark.proof
def test_ranks_norm_the_sum_of_their_outputs(tmp_path: Path) -> None:
    """Gemma 3 has norms after attention and after the MLP, where other families add to the residual."""
    assert_tokens_of_one_rank(replace(new_args("gemma3", tmp_path), num_blocks=80), 2)


@pytest.mark.parametrize(
    ("family", "algorithm"), [("qwen3_moe", "FP8_BLOCK_SCALES"), ("qwen3", "FP8_PER_CHANNEL_PER_TOKEN")]
)
def test_ranks_of_dynamic_fp8_round_their_own_share_of_an_input(family: str, algorithm: str, tmp_path: Path) -> None:
    """Shares of whole blocks are rounded as one rank rounds them; a token's scale is that of a rank's own columns."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 128}
    shape |= {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    expected = reference(export(build(family, **shape), algorithm, tmp_path, exporter=EXPORTERS[algorithm], ranks=2))
    args = RunnerArgs(
        model_dir=tmp_path, device="cpu", dtype="float32", tokens_per_block=8, num_blocks=40, max_batch_size=4,
        cpu_threads=1,
    )  # fmt: skip
    ranked = create_ranked_runner(args, start_ranks(2, unexpected))
    try:
        found = logprobs_of(ranked)
    finally:
        ranked.close()
    # The ranks' sums differ in the last bit, which may decide to which float8 value an input is rounded. With one scale
    # for the columns of both ranks the mean is 0.23.
    assert (found - expected).abs().quantile(0.25) < 1e-4 and (found - expected).abs().mean() < 0.05


@pytest.mark.proof
@pytest.mark.parametrize(("family", "expert_ranks"), [("qwen3", 1), ("qwen3_moe", 2)])
def test_a_deterministic_engine_of_four_ranks_gives_the_same_bits_in_any_batch(
    family: str, expert_ranks: int, tmp_path: Path
) -> None:
    args = new_args(family, tmp_path, deterministic=True, expert_ranks=expert_ranks)
    ranked = create_ranked_runner(args, start_ranks(4, unexpected))
    try:
        wishes = [wish for wish in workload(5) if wish.aborts is None]
        together, _ = served(ranked, wishes, overlap=True)
        for index, wish in enumerate(wishes[:5]):
            alone, _ = served(ranked, [wish], overlap=True, step_tokens=7)
            assert alone[0].tokens == together[index].tokens
            assert alone[0].logprobs == together[index].logprobs
    finally:
        ranked.close()


def test_a_killed_rank_is_reported_with_its_pid(tmp_path: Path) -> None:
    reasons: SimpleQueue[Exception] = SimpleQueue()
    ranked = create_ranked_runner(new_args("qwen3", tmp_path), start_ranks(2, reasons.put))
    (rank,) = ranked.ranks
    os.kill(rank.pid, signal.SIGKILL)
    assert f"rank 1 ended: pid {rank.pid}, exit code -9" in str(reasons.get(timeout=30))
    ranked.close()


def test_a_model_that_can_not_be_split_ends_the_ranks_again(tmp_path: Path) -> None:
    ranks = start_ranks(3, unexpected)
    with pytest.raises(UsageError, match="does not divide the model's 4 attention heads; expected 1, 2 or 4"):
        create_ranked_runner(new_args("qwen3", tmp_path), ranks)
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank.pid, 0)

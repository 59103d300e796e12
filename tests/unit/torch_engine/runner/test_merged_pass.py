"""Decodes and prompt chunks of a step in one pass over the weights: the same tokens as in two passes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch
from engine_player import assert_equal, served, workload
from runner_player import VOCAB, Player, build, random_prompt, save

from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import FROM_SLOT, Batch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


def new_runner(checkpoint: Path, *, merges: bool, kv_dtype: str = "auto") -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=checkpoint, device="cpu", tokens_per_block=8, num_blocks=60, max_batch_size=5, kv_dtype=kv_dtype,
            merges_passes=merges,
        )
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_two_passes(checkpoint: Path, seed: int, overlap: bool) -> None:
    wishes = workload(seed)
    expected, _ = served(new_runner(checkpoint, merges=False), wishes, overlap=False)
    found, _ = served(new_runner(checkpoint, merges=True), wishes, overlap=overlap)
    assert_equal(found, expected, wishes)


def test_a_mixed_step_is_one_pass(checkpoint: Path) -> None:
    """Seen from where it counts: how many rows the layers' weights are multiplied with, and how often. Behind the last
    layer's attention those are the last tokens of sequences alone, where a pass has chunks."""
    for merges, passes in ((False, [2, 12, 1]), (True, [14, 3])):
        player = Player(new_runner(checkpoint, merges=merges))
        decoding = [player.add(random_prompt(9, 1)), player.add(random_prompt(20, 2))]
        player.step(decoding)
        late = player.add(random_prompt(12, 3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
            player.step([*decoding, late])
        shapes = [event.input_shapes for event in seen.events() if event.name == "aten::linear"]
        rows = [x[0] for x, weight, *_ in shapes if weight[0] != VOCAB]
        assert [count for count, _ in groupby(rows)] == passes


def test_a_decode_whose_token_the_host_has_not_seen_takes_it_from_its_slot(checkpoint: Path) -> None:
    answers = []
    for merges in (False, True):
        player = Player(new_runner(checkpoint, merges=merges))
        first, second = player.add(random_prompt(9, 1)), player.add(random_prompt(12, 2))
        launched = player.runner.launch(Batch([first.share(100)]))
        share = first.share(100)
        share.is_first, share.start, share.new_token_ids = False, 9, [FROM_SLOT]
        mixed = player.runner.launch(Batch([share, second.share(100)]))
        answers.append([sampled.token_id for step in (launched, mixed) for sampled in step.results()])
    assert answers[0] == answers[1] and None not in answers[0]

"""Rows without numbers on CUDA, in a graph and without: each is an error of its own, and the others' tokens stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_player import Player, Playing, build, random_prompt, save

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.step import Batch, Sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
POISON = 17
DEVICE = "cuda"
ASKED = [SamplingParams(), SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(top_k=5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return save(model, tmp_path_factory.mktemp("poisoned"))


def decoded(checkpoint: Path, poisoned: set[int], *, graphs: bool) -> list[Sampled]:
    """One decode step of all of ``ASKED``, in which some have the poisoned token before them."""
    one = create_runner(
        RunnerArgs(
            model_dir=checkpoint, device=DEVICE, dtype="float32", tokens_per_block=16, max_tokens=4096,
            max_batch_size=8, cuda_graphs=graphs,
        )
    )  # fmt: skip
    player = Player(one)
    playing: list[Playing] = []
    for seed, sampling in enumerate(ASKED):
        prompt = [token if token != POISON else 3 for token in random_prompt(20 + seed, seed)]
        playing.append(player.add(prompt, sampling=sampling, seed=seed))
    player.step(playing)
    for row in poisoned:
        playing[row].output[-1] = POISON
    results = one.launch(Batch([sequence.share(1) for sequence in playing])).results()
    one.close()
    return results


@pytest.mark.parametrize("graphs", [True, False])
def test_a_row_without_numbers_is_an_error_of_its_own(checkpoint: Path, graphs: bool) -> None:
    clean = decoded(checkpoint, set(), graphs=graphs)
    assert [result.error for result in clean] == [None] * 4
    found = decoded(checkpoint, {1, 2}, graphs=graphs)
    assert [result.error is None for result in found] == [True, False, False, True]
    assert [found[row].token_id for row in (0, 3)] == [clean[row].token_id for row in (0, 3)]

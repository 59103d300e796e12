"""An EAGLE-3 head in the layout of the public checkpoints: what it drafts, and the very tokens that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import (
    CAPTURED,
    DRAFT_VOCAB,
    HIDDEN,
    RecordingModel,
    Reference,
    build_target,
    head_tensors,
    save_head,
)
from engine_player import Wish, assert_equal, served, workload
from runner_player import VOCAB, random_prompt, save
from torch import Tensor

from trtx.errors import UsageError
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner

MOST = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_target(), tmp_path_factory.mktemp("target"))


def new_runner(target: Path, head: Path, *, layers: list[int] | None = CAPTURED) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=8, num_blocks=11, max_batch_size=5, guided=True,
            max_draft_len=MOST, draft=DraftArgs("Eagle3", str(head), layers),
        )
    )  # fmt: skip


def always(runner: TorchRunner) -> Speculation:
    config = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=MOST, draft_len_schedule={5: MOST})
    return create_speculation(config, runner, max_num_tokens=24)


@pytest.mark.parametrize("captured", [CAPTURED, [-1, 1, 2]])
def test_the_engine_drafts_what_the_public_method_drafts(target: Path, tmp_path: Path, captured: list[int]) -> None:
    """In every step of a request with a prefix hit, also of one that was computed in chunks."""
    ids = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in captured]}
    runner = new_runner(target, save_head(tmp_path / "head", head_tensors(), eagle_config=ids), layers=None)
    assert runner.draft_model is not None
    runner.draft_model = recording = RecordingModel(runner.draft_model)
    drafts = recording.drafts
    speculation = always(runner)
    reference = Reference(build_target(), head_tensors(), captured)
    for wish in [Wish(0, random_prompt(37, 0)[:length], {"max_tokens": 10}, None) for length in (20, 37)]:
        found, _ = served(runner, [wish], overlap=True, step_tokens=16, speculation=speculation)
        whole = wish.prompt + found[0].tokens
        made = [(length, tokens) for length, tokens in drafts if tokens]
        assert len(made) > 3
        for length, tokens in made:
            assert tokens == reference.draft(whole[:length], len(tokens))
        drafts.clear()


def play(runner: TorchRunner, seed: int) -> None:
    wishes = workload(seed)
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(runner)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert sum(speculation.counts.drafted)


def test_a_head_with_its_own_embedding_loads(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "own", head_tensors() | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    play(new_runner(target, tmp_path / "own"), 0)


@pytest.mark.parametrize(
    ("tensors", "config", "layers", "message"),
    [
        ({}, {"hidden_size": 128}, CAPTURED, "hidden_size is 128, and the target model has 64"),
        ({}, {"vocab_size": VOCAB - 1}, CAPTURED, "vocab_size is 210, and the target model has 211"),
        ({}, {}, [0, 1, 3], r"eagle3_layers_to_capture is \[0, 1, 3\]; expected three different layers from 0 to 2"),
        (
            {"fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            {},
            CAPTURED,
            r"fc.weight has shape \[64, 64\], .* say \[64, 192\]",
        ),
        ({"midlayer.extra": torch.zeros(2)}, {}, CAPTURED, "holds the tensor midlayer.extra"),
        ({"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, {}, CAPTURED, "d2t leads to token 310"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_a_sentence(
    target: Path, tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], layers: Any, message: str
) -> None:
    save_head(tmp_path / "head", head_tensors() | tensors, **config)
    with pytest.raises(UsageError, match=message):
        new_runner(target, tmp_path / "head", layers=layers)

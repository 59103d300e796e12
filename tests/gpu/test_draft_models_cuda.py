"""Speculation with a draft model on a GPU: CUDA graphs of its passes, and the tokens that no speculation gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_reference import CAPTURED, RecordingModel, Reference, build_target, head_tensors, save_head
from engine_player import Wish, assert_equal, served, workload
from runner_player import VOCAB, random_prompt, save
from tokenizers import Tokenizer, models

from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
MOST = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(build_target(), tmp_path_factory.mktemp("target"))
    Tokenizer(models.WordLevel({f"t{at}": at for at in range(VOCAB)}, unk_token="t0")).save(
        str(directory / "tokenizer.json")
    )
    return directory


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target model as its own draft model, and a random head."""
    return {"Draft_Target": target, "Eagle3": save_head(tmp_path_factory.mktemp("head"), head_tensors())}


def new_runner(
    target: Path, kind: str, draft: Path, *, deterministic: bool = False, graphs: bool = True
) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cuda", dtype="float32", tokens_per_block=8, num_blocks=11, max_batch_size=5,
            max_draft_len=MOST, deterministic=deterministic, cuda_graphs=graphs,
            draft=DraftArgs(kind, str(draft), CAPTURED if kind == "Eagle3" else None),
        )
    )  # fmt: skip


def always(runner: TorchRunner) -> Speculation:
    config = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=MOST, draft_len_schedule={5: MOST})
    return create_speculation(config, runner, max_num_tokens=24)


@pytest.mark.parametrize(("deterministic", "graphs"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["Draft_Target", "Eagle3"])
def test_tokens_are_the_same_with_a_draft_model_and_without(
    target: Path, drafts: dict[str, Path], kind: str, deterministic: bool, graphs: bool
) -> None:
    runner = new_runner(target, kind, drafts[kind], deterministic=deterministic, graphs=graphs)
    for seed in (0, 1, 3):
        wishes = workload(seed)
        expected, _ = served(runner, wishes, overlap=False)
        speculation = always(runner)
        found, _ = served(runner, wishes, overlap=True, speculation=speculation)
        assert_equal(found, expected, wishes)
        assert sum(speculation.counts.drafted)
        assert kind == "Eagle3" or sum(speculation.counts.accepted)
    runner.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_drafts_what_the_public_method_drafts(target: Path, drafts: dict[str, Path], graphs: bool) -> None:
    runner = new_runner(target, "Eagle3", drafts["Eagle3"], graphs=graphs)
    assert runner.draft_model is not None
    runner.draft_model = recording = RecordingModel(runner.draft_model)
    made = recording.drafts
    wish = Wish(0, random_prompt(20, 0), {"max_tokens": 12}, None)
    found, _ = served(runner, [wish], overlap=True, speculation=always(runner))
    reference, whole = Reference(build_target(), head_tensors()), wish.prompt + found[0].tokens
    assert made
    for length, tokens in made:
        assert tokens == reference.draft(whole[:length], len(tokens))
    runner.close()

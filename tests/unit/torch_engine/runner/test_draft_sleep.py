"""An EAGLE-3 head sleeps and wakes with its target model, and stays as it is when that gets new weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from drafting_talks import LARGE, SMALL, Talks, new_runner
from eagle_reference import CAPTURED, HIDDEN, Reference, build_target, head_tensors, save_head
from replaced_weights import mirror
from runner_player import VOCAB, save

from trtx.errors import UsageError
from trtx.torch_engine.messages import MEMORY_TAGS, MemoryTag
from trtx.torch_engine.runner import DraftArgs, TorchRunner
from trtx.torch_engine.runner.eagle_head import EagleHead
from trtx.torch_engine.runner.host_copies import pools_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_target(), tmp_path_factory.mktemp("target"))


def sleeper(target: Path, directory: Path, *, keeps_weights: bool = True, own_embedding: bool = False) -> TorchRunner:
    tensors = head_tensors()
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    head = save_head(directory, tensors)
    draft = DraftArgs("Eagle3", str(head), CAPTURED)
    return new_runner(target, draft, sleeps=True, keeps_weights=keeps_weights)


def sleep(talks: Talks, runner: TorchRunner, tags: Collection[MemoryTag]) -> None:
    """As an engine does it."""
    pool, kv = talks.core.scheduler.pool, talks.speculation.draft_kv
    assert kv is not None
    whole = [(block, name) for name in pool.names if kv.is_whole(block := pool.find(name) or 0, name)]
    assert whole
    talks.core.forget_cache()
    assert not any(kv.is_whole(block, name) for block, name in whole), "the KV is gone"
    runner.release(tags)
    runner.restore(tags)
    talks.begin()


@pytest.mark.parametrize("keeps_weights", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_its_memory_is_released_and_comes_back(
    keeps_weights: bool, own_embedding: bool, target: Path, tmp_path: Path
) -> None:
    runner = sleeper(target, tmp_path / "head", keeps_weights=keeps_weights, own_embedding=own_embedding)
    head = runner.draft_model
    assert isinstance(head, EagleHead)
    weights = head._decoder._weights
    talks = Talks(runner, "Eagle3", num_blocks=LARGE)
    talks.ask_all()
    drafts = list(talks.model.drafts)
    held = [*pools_of(runner), weights.projection, weights.head, weights.to_target, head._decoder._embedding]
    places = [tensor.data_ptr() for tensor in held]
    assert all(tensor.any() for tensor in held)
    runner.release(MEMORY_TAGS)
    assert not any(tensor.any() for tensor in held)
    runner.restore(MEMORY_TAGS)
    assert not any(pool.any() for pool in pools_of(runner)) and all(tensor.any() for tensor in held[3:])
    talks.core.forget_cache()
    talks.begin()
    talks.ask_all()
    assert talks.model.drafts == drafts
    assert [tensor.data_ptr() for tensor in held] == places
    runner.close()


@pytest.mark.parametrize("host_blocks", [0, LARGE])
@pytest.mark.parametrize("tags", [MEMORY_TAGS, ["kv_cache"], ["model_weights"]])
def test_after_each_wake_it_drafts_what_the_public_method_drafts(
    tags: Collection[MemoryTag], host_blocks: int, target: Path, tmp_path: Path
) -> None:
    """The conversations are the same, so the blocks have the ids and the names of those before the sleep."""
    runner = sleeper(target, tmp_path / "head")
    reference = Reference(build_target(), head_tensors(), CAPTURED)
    talks = Talks(runner, "Eagle3", num_blocks=SMALL, host_blocks=host_blocks)
    for first_answers in (6, 1):
        talks.compare(reference, first_answers=first_answers)
        sleep(talks, runner, tags)
    runner.close()


def test_new_weights_of_the_target_model_leave_the_head_as_it_is(target: Path, tmp_path: Path) -> None:
    """The head reads their embedding and their hidden states."""
    model = build_target()
    mirror(model)
    runner = sleeper(target, tmp_path / "head")
    talks = Talks(runner, "Eagle3", num_blocks=SMALL, host_blocks=LARGE)
    talks.compare(Reference(build_target(), head_tensors(), CAPTURED))
    runner.update_weights(save(model, tmp_path / "second"))
    sleep(talks, runner, MEMORY_TAGS)
    talks.compare(Reference(model, head_tensors(), CAPTURED))
    runner.close()


def test_a_wake_without_the_head_s_checkpoint_fails_and_can_be_tried_again(target: Path, tmp_path: Path) -> None:
    runner = sleeper(target, tmp_path / "head", keeps_weights=False)
    talks = Talks(runner, "Eagle3", num_blocks=LARGE)
    runner.release(MEMORY_TAGS)
    (tmp_path / "head").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        runner.restore(MEMORY_TAGS)
    assert not runner._decoder._weights.head.any(), "the target model's weights are released again"
    (tmp_path / "elsewhere").rename(tmp_path / "head")
    runner.restore(MEMORY_TAGS)
    talks.compare(Reference(build_target(), head_tensors(), CAPTURED))
    runner.close()

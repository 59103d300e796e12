"""A draft model beside a host tier: blocks that return bring its KV, and the features of an EAGLE-3 head, with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafting_talks import LARGE, SIZE, SMALL, TALKS, TURNS, Talks, new_runner
from eagle_reference import CAPTURED, Reference, build_target, head_tensors, save_head
from noisy_drafts import with_tokenizer
from runner_player import save

from trtx.checkpoint.model_config import read_model_config
from trtx.memory.draft_models import draft_memory
from trtx.torch_engine.runner import DraftArgs


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(build_target(), tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize("first_answers", [6, 1])
def test_a_head_drafts_for_returned_blocks_what_the_public_method_drafts(
    first_answers: int, target: Path, tmp_path: Path
) -> None:
    head = save_head(tmp_path / "head", head_tensors())
    runner = new_runner(target, DraftArgs("Eagle3", str(head), CAPTURED))
    talks = Talks(runner, "Eagle3", num_blocks=SMALL, host_blocks=LARGE)
    reference = Reference(build_target(), head_tensors(), CAPTURED)
    for _ in range(2):  # the second time, the blocks have other contents from before
        talks.core.forget_cache()
        talks.begin()
        talks.compare(reference, first_answers=first_answers)
    assert talks.core.tier is not None and talks.core.tier.counters.loaded > TALKS * TURNS


@pytest.mark.parametrize("kind", ["Eagle3", "Draft_Target"])
def test_the_draft_model_computes_little_for_conversations_that_return(kind: str, target: Path, tmp_path: Path) -> None:
    """The target model as its own draft is always right, so its KV is whole too."""
    directory = save_head(tmp_path / "head", head_tensors()) if kind == "Eagle3" else target
    layers = CAPTURED if kind == "Eagle3" else None
    runner = new_runner(target, DraftArgs(kind, str(directory), layers))
    large, tiered, small = (
        Talks(runner, kind, num_blocks=blocks, host_blocks=host)
        for blocks, host in ((LARGE, 0), (SMALL, LARGE), (SMALL, 0))
    )  # fmt: skip
    computed = [talks.ask_all() for talks in (large, tiered, small)]
    assert large.histories == tiered.histories == small.histories
    assert computed[0] <= computed[1] < computed[2] / 2
    counts, tier = tiered.speculation.counts, tiered.core.tier
    if kind == "Draft_Target":
        assert counts.drafted == counts.accepted != []
    assert tier is not None and tier.counters.loaded > TALKS * TURNS
    planned = draft_memory(
        directory, kind, read_model_config(target), layers=layers, dtype="float32", max_num_tokens=1, max_batch_size=1
    )
    assert tier.block_bytes == runner.geometry.block_bytes + SIZE * planned.token_bytes > runner.geometry.block_bytes

"""Speculation with a small model that drafts: what it computes, and which drafts come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_player import Engine, Wish, assert_equal, served, workload
from noisy_drafts import save_noisy, with_tokenizer
from runner_player import VOCAB, build, random_prompt, save

from trtx.errors import UsageError
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation, SpeculationCounts
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import MEMORY_TAGS, Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.draft_target import SmallModel

MOST = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(build("qwen3"), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_noisy(build("qwen3"), tmp_path_factory.mktemp("draft"))


def new_runner(target: Path, draft: Path, kind: str = "Draft_Target", **changes: Any) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=8, num_blocks=11, max_batch_size=5, guided=True,
            max_draft_len=MOST, draft=DraftArgs(kind, str(draft)), **changes,
        )
    )  # fmt: skip


def always(runner: TorchRunner, *, step_tokens: int = 24) -> Speculation:
    """Verifies all that the model drafts."""
    config = SpeculativeConfig(decoding_type="Draft_Target", max_draft_len=MOST, draft_len_schedule={5: MOST})
    return create_speculation(config, runner, max_num_tokens=step_tokens)


def test_the_target_model_as_its_own_draft_is_always_right(target: Path) -> None:
    """Also after a prefix hit, a preemption and a wrong token: its KV cache then holds what the target's holds."""
    wishes = [Wish(index, random_prompt(20, index % 2), {"max_tokens": 12}, None) for index in range(6)]
    runner = new_runner(target, target)
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(runner)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert speculation.counts.drafted == speculation.counts.accepted != []


def test_a_prefix_hit_saves_the_draft_model_its_prompt(target: Path, draft: Path) -> None:
    runner = new_runner(target, draft)
    computed: list[int] = []
    model = runner.draft_model
    assert model is not None

    class Counting:
        token_shift, room, pools = model.token_shift, model.room, model.pools

        def draft(self, shares):  # type: ignore[no-untyped-def]
            computed.extend(len(share.tokens) for share in shares)
            return model.draft(shares)

    runner.draft_model = Counting()
    engine = Engine(runner, overlap=True, speculation=always(runner, step_tokens=64))
    for index in range(2):
        wish = Wish(0, random_prompt(30, 0), {"max_tokens": 6}, None)
        engine.core.submit(Submit(index, wish.prompt, wish.plan))
        engine.finish()
    longest = sorted(computed)[-2:]
    assert longest[1] >= 31, "the first request computes its prompt"
    assert longest[0] <= 31 - 24, "the second one finds three blocks"


def counts_of(runner: TorchRunner) -> SpeculationCounts:
    """Of a workload whose tokens are those without a draft model."""
    wishes, speculation = workload(3), always(runner)
    expected, _ = served(runner, wishes, overlap=False)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    return speculation.counts


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_the_draft_model_sleeps_and_wakes_with_its_target(target: Path, draft: Path, keeps_weights: bool) -> None:
    runner = new_runner(target, draft, sleeps=True, keeps_weights=keeps_weights)
    before = counts_of(runner)
    model = runner.draft_model
    assert isinstance(model, SmallModel) and isinstance(model._runner, TorchRunner)
    runner.release(MEMORY_TAGS)
    assert not model._runner.pool.any() and not model._runner._decoder._weights.head.any()
    runner.restore(MEMORY_TAGS)
    after = counts_of(runner)
    assert (after.drafted, after.accepted) == (before.drafted, before.accepted)
    runner.close()


def test_a_long_prompt_is_drafted_for_once_the_draft_model_has_computed_it(target: Path) -> None:
    runner = new_runner(target, target)
    wish = Wish(0, random_prompt(40, 0), {"max_tokens": 12}, None)
    expected, _ = served(runner, [wish], overlap=False)
    speculation = always(runner, step_tokens=16)
    found, _ = served(runner, [wish], overlap=True, speculation=speculation)
    assert found[0].tokens == expected[0].tokens
    assert speculation.counts.drafted == speculation.counts.accepted != []


def test_a_sequence_beyond_the_context_of_the_draft_model_goes_on_without_drafts(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shorter = with_tokenizer(save(build("qwen3", max_position_embeddings=32), tmp_path_factory.mktemp("shorter")))
    runner = new_runner(target, shorter)
    wish = Wish(0, random_prompt(20, 0), {"max_tokens": 40}, None)
    expected, _ = served(runner, [wish], overlap=False)
    speculation = always(runner)
    found, _ = served(runner, [wish], overlap=True, speculation=speculation)
    assert found[0].tokens == expected[0].tokens
    assert 0 < sum(speculation.counts.drafted) <= 12


def test_a_draft_model_of_another_vocabulary_or_tokenizer_is_refused(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    smaller = with_tokenizer(save(build("qwen3", vocab_size=VOCAB - 1), tmp_path_factory.mktemp("smaller")))
    with pytest.raises(UsageError, match=r"has 210 tokens and .* has 211; expected a draft model with the same vocab"):
        new_runner(target, smaller)
    other = with_tokenizer(save(build("qwen3"), tmp_path_factory.mktemp("other")), "u")
    with pytest.raises(UsageError, match=r"different tokenizers \(the token 't0' is 0 in one and none in the other\)"):
        new_runner(target, other)

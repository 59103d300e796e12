"""Logits processors with a real model: the same tokens however they are computed, and their place among other edits."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Engine, Wish, assert_equal
from examples import first_of
from guided_player import EOS, character_vocabulary, text_of
from processed_player import Among, processed_workload, served_processed
from runner_player import build, random_prompt, save, small_runner

from trtx.torch_engine.core.grammars import Grammars
from trtx.torch_engine.core.logits_processors import LoadedProcessors
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.messages import Submit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


new_runner = partial(small_runner, dtype="float32")


@pytest.mark.parametrize("changes", first_of(2, [{"num_blocks": 11}, {"deterministic": True}, {}]), ids=str)
def test_tokens_are_the_same_with_and_without_overlap_chunks_and_preemption(
    checkpoint: Path, changes: dict[str, Any]
) -> None:
    one, other = new_runner(checkpoint, **changes), new_runner(checkpoint)
    paused = 0
    for seed in range(2):
        wishes, hooks = processed_workload(seed)
        found, waited = served_processed(one, wishes, hooks, overlap=True)
        paused += waited
        expected, _ = served_processed(other, wishes, hooks, overlap=False, step_tokens=9)
        if "deterministic" not in changes:  # which rounds in another way
            assert_equal(found, expected, wishes)
        for at, hook in hooks.items():
            for count, token in enumerate(found[at].tokens):
                before = wishes[at].prompt + found[at].tokens[:count]
                assert token in hook.allowed(before, one.vocab_size)
    assert ("num_blocks" not in changes) or paused, "the small pool has preempted"


def test_other_requests_are_bit_for_bit_the_same_beside_processed_ones(checkpoint: Path) -> None:
    one = new_runner(checkpoint, deterministic=True)
    wishes, hooks = processed_workload(4)
    for wish in wishes:
        wish.params["logprobs"] = 2
    beside, _ = served_processed(one, wishes, hooks, overlap=True)
    for at, wish in enumerate(wishes):
        own = {0: hooks[at]} if at in hooks else {}
        alone, _ = served_processed(one, [Wish(0, wish.prompt, wish.params, None)], own, overlap=False)
        assert (alone[0].tokens, alone[0].logprobs) == (beside[at].tokens, beside[at].logprobs)


def test_logprobs_are_those_of_the_models_own_logits(checkpoint: Path) -> None:
    """A prompt that ends with the answer has the same logprobs, and no processor."""
    one = new_runner(checkpoint)
    prompt, params = random_prompt(7, 1), {"max_tokens": 9, "logprobs": 1, "end_id": -1}
    answer = served_processed(one, [Wish(0, prompt, params, None)], {0: Among(3)}, overlap=True)[0][0]
    scored = Wish(0, prompt + answer.tokens, {"max_tokens": 1, "prompt_logprobs": 1}, None)
    rows = served_processed(one, [scored], {}, overlap=True)[0][0].prompt_logprobs[len(prompt) - 1 :]
    for token, own, row in zip(answer.tokens, answer.logprobs, rows, strict=True):
        assert (own[token].logprob, own[token].rank) == (pytest.approx(row[token].logprob, abs=1e-4), row[token].rank)


def test_penalties_come_after_the_processors(checkpoint: Path) -> None:
    """The processor makes two tokens equally likely; a penalty of the first one decides for the second."""

    def level(_: int, logits: torch.Tensor, *__: object) -> None:
        logits.fill_(-torch.inf)
        logits[..., [5, 9]] = 1.0

    one = new_runner(checkpoint)
    wish = Wish(0, random_prompt(6, 1), {"max_tokens": 2, "frequency_penalty": 0.5, "end_id": -1}, None)
    assert set(wish.prompt).isdisjoint({5, 9})
    answer = served_processed(one, [wish], {0: level}, overlap=True)[0][0]
    assert answer.tokens == [5, 9]


def test_a_grammar_holds_whatever_a_processor_prefers(checkpoint: Path) -> None:
    def prefers_letters(_: int, logits: torch.Tensor, *__: object) -> None:
        logits[..., ord("a") - 32 : ord("z") - 31] += 1000.0
        logits[..., ord("7") - 32] += 500.0

    one = new_runner(checkpoint, guided=True)
    compiled = threading.Event()
    grammars = Grammars(character_vocabulary(one.vocab_size), vocab_size=one.vocab_size, on_compiled=compiled.set)
    engine = Engine(one, overlap=True, grammars=grammars)
    guide = GuidedDecodingParams(regex="[0-9]{4}[xyz]?")
    plan = Wish(0, [], {"max_tokens": 9, "end_id": EOS, "guided_decoding": guide}, None).plan
    engine.core.submit(Submit(0, random_prompt(5, 1), plan), LoadedProcessors((prefers_letters,)))
    assert compiled.wait(60)
    engine.step()
    engine.finish()
    grammars.close()
    text = text_of(engine.answers[0].tokens)
    assert re.fullmatch("7777[xyz]", text), text


def test_logits_that_are_no_numbers_end_their_own_request(checkpoint: Path) -> None:
    def spoils(_: int, logits: torch.Tensor, *__: object) -> None:
        logits[..., 3] = torch.nan

    one = new_runner(checkpoint)
    engine = Engine(one, overlap=True)
    for at, hook in enumerate(((spoils,), ())):
        plan = Wish(0, [], {"max_tokens": 5, "end_id": -1}, None).plan
        engine.core.submit(Submit(at, random_prompt(5, at), plan), LoadedProcessors(hook))
    updates = []
    while engine.core.wait_s == 0.0 or engine.core.scheduler.running or engine.core.scheduler.waiting:
        report = engine.core.step()
        updates += report.updates if report is not None else []
    (failed,) = [update for update in updates if update.error is not None]
    assert (failed.sequence_id, failed.is_failure) == (0, False)
    assert "logits processors" in str(failed.error)
    assert sum(len(update.token_ids) for update in updates if update.sequence_id == 1) == 5

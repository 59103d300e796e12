"""Logits processors in the engine core, with an oracle that takes any token that they leave."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.oracle_runner import VOCAB, undisturbed
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.core.logits_processors import load_processors
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.sampling_plan import SamplingPlan


def choice_after(tokens: list[int], salt: int = 0) -> int:
    return (sum(tokens) * 31 + len(tokens) * 7 + salt) % VOCAB


def forced(prompt: list[int], count: int, salt: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choice_after(tokens, salt))
    return tokens[len(prompt) :]


class Forced:
    """Leaves the token that follows from all tokens so far, and notes its calls."""

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt
        self.seen: list[list[int]] = []

    def __call__(self, req_id: int, logits: torch.Tensor, token_ids: list[list[int]], *_: object) -> None:
        assert logits.shape == (1, 1, VOCAB)
        (tokens,) = token_ids
        self.seen.append(list(tokens))
        wanted = choice_after(tokens, self.salt)
        logits[:, :, :wanted] = logits[:, :, wanted + 1 :] = -torch.inf
        tokens.append(-1)  # its own list


class Raising:
    def __init__(self, error: BaseException, after: int = 0) -> None:
        self.error, self.after, self.calls = error, after, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls > self.after:
            raise self.error


def ask(harness: Harness, at: int, prompt: list[int], max_tokens: int, *processors: Any, **plan: Any) -> None:
    """The processors run in this process: they are handed to the core as the socket's thread loads them."""
    submit = Submit(at, prompt, SamplingPlan(max_tokens=max_tokens, **plan))
    loaded = load_processors(pickle.dumps([]))
    harness.core.submit(submit, type(loaded)(tuple(processors)))


@pytest.mark.parametrize("overlap", [True, False])
def test_each_token_is_chosen_from_the_logits_that_a_processor_leaves(overlap: bool) -> None:
    h, hook = Harness(overlap=overlap), Forced()
    ask(h, 1, prompt_of(20), 9, hook)
    ask(h, 2, prompt_of(7, 3), 12)
    h.run()
    assert h.tokens[1] == forced(prompt_of(20), 9)
    assert h.tokens[2] == undisturbed(prompt_of(7, 3), 12)
    whole = prompt_of(20) + h.tokens[1]
    assert hook.seen == [whole[: 20 + count] for count in range(9)], "one call for each token, with all before it"


def test_several_processors_edit_in_their_order() -> None:
    order: list[str] = []
    h = Harness()
    ask(h, 1, prompt_of(3), 2, lambda *_: order.append("first"), lambda *_: order.append("second"))
    h.run()
    assert order == ["first", "second"] * 2


def test_a_sequence_that_has_ended_is_not_processed_again() -> None:
    hook = Forced()
    tokens = forced(prompt_of(5), 8)
    end = tokens[3]
    h = Harness()
    ask(h, 1, prompt_of(5), 30, hook, end_ids=(end,))
    ask(h, 2, prompt_of(6, 2), 30, Forced(1))
    h.run()
    assert h.tokens[1] == tokens[: tokens.index(end) + 1]
    assert len(hook.seen) == len(h.tokens[1])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), blocks=st.integers(14, 40), overlap=st.booleans(), chunk=st.integers(3, 24))
def test_processed_and_other_requests_keep_their_tokens_under_preemption(
    seed: int, blocks: int, overlap: bool, chunk: int
) -> None:
    """Small pools preempt, small steps cut prompts into chunks, and prompts share prefixes."""
    dice = random.Random(seed)
    h = Harness(num_blocks=blocks, overlap=overlap, tokens=chunk, batch=4)
    hooks: dict[int, Forced] = {}
    wishes = []
    for at in range(dice.randint(2, 8)):
        length = dice.randint(1, 22)
        prompt = prompt_of(30, dice.randint(0, 2))[:length] if dice.random() < 0.5 else prompt_of(length, at)
        wishes.append((dice.randint(0, 10), at, prompt, dice.choice([1, 5, 20]), dice.random() < 0.6))
    for step in range(12):
        for arrives, at, prompt, count, is_processed in wishes:
            if arrives == step:
                hooks[at] = Forced(at)
                ask(h, at, prompt, count, *([hooks[at]] if is_processed else []))
        h.step()
    h.run()
    for _, at, prompt, count, is_processed in wishes:
        expected = forced(prompt, count, at) if is_processed else undisturbed(prompt, count)
        assert h.tokens[at] == expected
        if is_processed:
            assert [len(seen) for seen in hooks[at].seen] == [len(prompt) + done for done in range(count)]
    assert h.is_empty()


@pytest.mark.parametrize("error", [ValueError("no such table"), SystemExit(3), MemoryError()])
def test_an_exception_ends_its_own_request_with_a_message(error: BaseException) -> None:
    h = Harness()
    ask(h, 1, prompt_of(5), 8, Raising(error, after=2))
    ask(h, 2, prompt_of(9, 1), 8, Forced())
    ask(h, 3, prompt_of(9, 2), 8)
    h.run()
    assert h.errors.keys() == {1}
    assert "Raising failed after 2 tokens: " + type(error).__name__ in h.errors[1]
    assert len(h.tokens[1]) == 2, "the tokens before it were sent"
    assert not next(update for update in h.updates if update.error).is_failure, "the request's own fault"
    assert (h.tokens[2], h.tokens[3]) == (forced(prompt_of(9, 1), 8), undisturbed(prompt_of(9, 2), 8))
    assert h.is_empty()


def test_an_error_of_the_device_ends_the_engine() -> None:
    h = Harness()
    ask(h, 1, prompt_of(5), 8, Raising(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(RuntimeError, match="device-side assert"):
        h.run()


def test_logits_that_leave_no_token_end_their_own_request() -> None:
    def nothing(_: int, logits: torch.Tensor, *__: object) -> None:
        logits.fill_(torch.nan)

    h = Harness()
    ask(h, 1, prompt_of(5), 8, nothing)
    ask(h, 2, prompt_of(6), 8)
    h.run()
    assert h.errors.keys() == {1}
    assert not next(update for update in h.updates if update.error).is_failure
    assert h.tokens[2] == undisturbed(prompt_of(6), 8)


class Batched:
    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.fails_at = fails_at

    def __call__(
        self, req_ids: list[int], logits: list[torch.Tensor], token_ids: list[list[list[int]]], stream: Any, ids: Any
    ) -> None:
        self.calls.append(req_ids)
        assert stream is None and ids == [None] * len(req_ids)
        if len(self.calls) == self.fails_at:
            raise KeyError("state")
        for row, (tokens,) in zip(logits, token_ids, strict=True):
            wanted = choice_after(tokens)
            row[:, :, :wanted] = row[:, :, wanted + 1 :] = -torch.inf


def test_a_batched_processor_gets_the_requests_of_a_step_that_ask_for_it() -> None:
    hook = Batched()
    h = Harness(batched_processor=hook)
    ask(h, 1, prompt_of(5), 6, applies_batched=True)
    ask(h, 2, prompt_of(6, 1), 6)
    ask(h, 3, prompt_of(7, 2), 6, applies_batched=True)
    h.run()
    assert [h.tokens[at] for at in (1, 3)] == [forced(prompt_of(5), 6), forced(prompt_of(7, 2), 6)]
    assert h.tokens[2] == undisturbed(prompt_of(6, 1), 6)
    assert [1, 3] in hook.calls, "decodes of one step come in one call"


def test_an_exception_of_a_batched_processor_ends_the_requests_of_that_call() -> None:
    h = Harness(batched_processor=Batched(fails_at=3))
    for at in (1, 2):
        ask(h, at, prompt_of(5, at), 6, applies_batched=True)
    ask(h, 3, prompt_of(6), 6)
    h.run()
    assert h.errors.keys() == {1, 2}
    assert all("Batched failed after 2 tokens: KeyError" in text for text in h.errors.values())
    assert h.tokens[3] == undisturbed(prompt_of(6), 6)


def test_processors_that_cannot_be_loaded_refuse_their_request_alone() -> None:
    h = Harness()
    for at, pickled in ((1, b"no pickle"), (2, b"cno_such_module\nname\n.")):
        h.core.submit(Submit(at, prompt_of(4), SamplingPlan(max_tokens=3), processors=pickled))
    h.submit(3, prompt_of(4), 3)
    h.run()
    assert h.errors.keys() == {1, 2}
    assert "ModuleNotFoundError: No module named 'no_such_module'" in h.errors[2]
    assert h.tokens[3] == undisturbed(prompt_of(4), 3)

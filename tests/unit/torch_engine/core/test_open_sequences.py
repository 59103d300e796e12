"""How sequences arrive and end: choices of one request that share its prompt."""

from __future__ import annotations

import pytest

from tests.unit.torch_engine.core.oracle_runner import undisturbed
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of

SIZE = 4  # of the oracle's blocks


def choices(harness: Harness, prompt: list[int], count: int, *, max_tokens: int = 6) -> None:
    for at in range(1, count + 1):
        harness.submit(at, prompt, max_tokens, follows=1 if at > 1 else None)


def computed(harness: Harness) -> int:
    return sum(tokens for _, tokens in harness.runner.steps)


@pytest.mark.parametrize("overlap", [True, False])
def test_choices_compute_their_prompt_once(overlap: bool) -> None:
    h, prompt = Harness(overlap=overlap, tokens=16), prompt_of(50)
    choices(h, prompt, 5)
    h.run()
    assert all(h.tokens[at] == undisturbed(prompt, 6) for at in range(1, 6))
    of_choice = 50 - 48 + 5  # the rest of the prompt behind its full blocks, and all tokens but the last
    assert computed(h) == 50 + 5 + 4 * of_choice
    assert h.is_empty()


def test_choices_of_a_prompt_without_a_full_block_start_at_once() -> None:
    h = Harness()
    choices(h, prompt_of(SIZE), 3)
    h.step()
    assert h.runner.largest_batch == 3


def test_choices_start_at_once_where_blocks_are_not_reused() -> None:
    h = Harness(num_blocks=128, tokens=64, enable_block_reuse=False)
    choices(h, prompt_of(20), 3)
    h.step()
    assert h.runner.largest_batch == 3


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_choices_go_on_after_the_first_one_was_aborted_or_has_ended(max_tokens: int) -> None:
    for aborted in (True, False):
        h, prompt = Harness(tokens=8), prompt_of(40)
        choices(h, prompt, 3, max_tokens=max_tokens)
        h.step()
        if aborted:
            h.core.abort([1])
        h.run()
        for at in (2, 3):
            assert h.tokens[at] == undisturbed(prompt, max_tokens)
        assert h.finished[1] == ("cancelled" if aborted else "length")
        assert h.is_empty()


def test_a_choice_is_aborted_while_it_waits_for_the_prompt() -> None:
    h, prompt = Harness(tokens=8), prompt_of(40)
    choices(h, prompt, 3)
    h.step()
    h.core.abort([2])
    h.run()
    assert h.finished == {1: "length", 2: "cancelled", 3: "length"}
    assert h.tokens[3] == undisturbed(prompt, 6)
    assert h.is_empty()


def test_choices_share_their_prompt_in_a_pool_that_preempts() -> None:
    h, prompt = Harness(num_blocks=20, tokens=8), prompt_of(30)
    choices(h, prompt, 4, max_tokens=20)
    h.run()
    assert all(h.tokens[at] == undisturbed(prompt, 20) for at in range(1, 5))
    assert h.is_empty()

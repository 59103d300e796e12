"""Short prompts pass a long one, within bounds for both, and nothing else changes its place."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.oracle_runner import undisturbed
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.core.short_prompts import LOOKED_AT

BUDGET = 16
"""Tokens of a step; short prompts may have half of them while a long one is in progress."""


class Clocked(Harness):
    """Counts steps, and notes the one in which each request got its first token."""

    def __init__(self, num_blocks: int = 512, **options: bool) -> None:
        super().__init__(num_blocks, batch=32, tokens=BUDGET, enable_block_reuse=False, **options)
        self.now = 0
        self.arrived: dict[int, int] = {}
        self.answered: dict[int, int] = {}

    def arrive(self, number: int, length: int) -> None:
        self.submit(number, prompt_of(length, number), 1)
        self.arrived[number] = self.now

    def step(self) -> None:
        self.now += 1
        super().step()
        for number in self.tokens:
            self.answered.setdefault(number, self.now)

    def waited(self, number: int) -> int:
        return self.answered[number] - self.arrived[number]


def steps_alone(length: int) -> int:
    h = Clocked()
    h.arrive(1, length)
    h.run()
    return h.waited(1)


def test_a_short_prompt_passes_a_long_one_which_takes_at_most_twice_its_time() -> None:
    h = Clocked()
    h.arrive(1, 400)
    for _ in range(3):
        h.step()
    for number in range(2, 60):
        h.arrive(number, 8)
        h.step()
        h.step()
    h.run()
    waits = [h.waited(number) for number in range(2, 60)]
    assert max(waits[:20]) <= 3
    assert steps_alone(400) < h.waited(1) <= 2 * steps_alone(400) + 2


def test_equal_prompts_are_answered_in_the_order_of_their_arrival() -> None:
    h = Clocked()
    for number in range(1, 8):
        h.arrive(number, 100)
    h.run()
    assert sorted(h.answered, key=lambda number: h.answered[number]) == list(range(1, 8))
    assert h.waited(1) == steps_alone(100)


def test_a_long_prompt_that_waits_for_blocks_is_not_kept_waiting_by_short_ones() -> None:
    h = Clocked(num_blocks=64)  # of 4 tokens
    h.arrive(1, 200)
    h.step()
    h.arrive(2, 200)
    for number in range(3, 60):
        h.arrive(number, 8)
        h.step()
    h.run()
    assert h.waited(2) <= 2 * (steps_alone(200) + steps_alone(200)) + 4
    assert all(h.tokens[number] == undisturbed(prompt_of(8, number), 1) for number in range(3, 60))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.integers(1, 8), st.integers(200, 500))), min_size=2, max_size=24
    ),
    st.booleans(),
)
def test_no_prompt_waits_longer_than_its_bound(requests: list[tuple[int, int]], overlap: bool) -> None:
    """``requests``: steps since the one before, and the length of its prompt."""
    h = Clocked(overlap=overlap)
    lengths = {number: length for number, (_, length) in enumerate(requests, 1)}
    for number, (pause, length) in enumerate(requests, 1):
        for _ in range(pause):
            h.step()
        h.arrive(number, length)
    h.run()
    longs = [number for number, length in lengths.items() if length > 8]
    for number, length in lengths.items():
        assert h.tokens[number] == undisturbed(prompt_of(length, number), 1)
        before = [other for other in lengths if other < number]
        if number in longs:
            earlier = [lengths[other] for other in longs if other <= number]
            assert h.waited(number) <= sum(2 * -(-each // BUDGET) + 3 for each in earlier) + len(before)
        elif len(longs) < LOOKED_AT:
            open_then = [other for other in before if h.answered[other] > h.arrived[number]]
            shorts = sum(lengths[other] for other in open_then if other not in longs) + length
            # Half of each step; a prompt that would be cut waits for the next one; a long prompt begins or ends.
            assert h.waited(number) <= -(-shorts // (BUDGET // 2)) * 2 + 3 + 3 * len(longs)

"""Levels of latencies: the same, apart, or too few to tell, against what was drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bench.simulated_load import MS, Request, closed_loop, drawn
from trtx.bench.judge.steadiness import (
    BATCHES,
    Steadiness,
    SteadinessResult,
    judge_trend,
    judge_warm_up,
    level_ratio,
    warm_up_needed,
)
from trtx.bench.phases import Phases, closed_loop_phases, sent_in
from trtx.bench.records import RequestRecord

pytestmark = pytest.mark.slow


def _records(ttfts: Sequence[float], itl: float | None = 5) -> list[RequestRecord]:
    return [RequestRecord(i * MS, (i + 500) * MS, None, ttft, itl, ttft + 100, 64, 20) for i, ttft in enumerate(ttfts)]


def _noisy(rng: random.Random, count: int, level: float, noise: float) -> list[float]:
    return [level * rng.lognormvariate(0, noise) for _ in range(count)]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.floats(0.01, 1e5), max_size=40), st.lists(st.floats(0.01, 1e5), max_size=40), st.floats(0.1, 10))
def test_a_ratio_follows_its_levels_and_needs_enough_of_both(
    before: list[float], after: list[float], factor: float
) -> None:
    found = level_ratio(before, after)
    assert (found is None) == (min(len(before), len(after)) < BATCHES)
    if found is not None:
        assert found.low <= found.value <= found.high
        scaled = level_ratio(before, [factor * value for value in after])
        assert scaled is not None and scaled.value == pytest.approx(factor * found.value)
        back = level_ratio(after, before)
        assert back is not None and back.low == pytest.approx(1 / found.high)


@pytest.mark.parametrize("count", [8, 20, 100])
def test_an_interval_of_99_percent_has_the_true_ratio_in_it_that_often(count: int) -> None:
    rng = random.Random(1)
    missed = 0
    for _ in range(400):
        found = level_ratio(_noisy(rng, count, 10, 0.5), _noisy(rng, count, 15, 0.5))
        assert found is not None
        missed += not found.low <= 1.5 <= found.high
    assert missed <= 8  # 4 are expected at the most; more than 8 come once in fifty


def test_requests_that_are_slow_together_are_no_independent_samples() -> None:
    # Waves of ten that share their luck. As single samples they would miss the true ratio, 1, every third time.
    rng = random.Random(2)
    missed = 0
    for _ in range(200):
        sides = [[level for level in _noisy(rng, 8, 10, 0.3) for _ in range(10)] for _ in range(2)]
        found = level_ratio(*sides)
        assert found is not None
        missed += not found.low <= 1 <= found.high
    assert missed <= 6


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(20, 200))
def test_a_level_that_holds_is_never_called_unsteady_and_one_that_doubles_never_steady(seed: int, count: int) -> None:
    rng = random.Random(seed)
    same, twice = _noisy(rng, 2 * count, 100, 0.05), _noisy(rng, count, 200, 0.05)
    assert judge_trend(_records(same)).steadiness is Steadiness.STEADY
    found = judge_trend(_records([*same[:count], *twice]))
    assert found.steadiness is Steadiness.NOT_STEADY
    assert "TTFT was" in found.reason and "times as long in the second half as in the first (99 %: " in found.reason


def test_few_or_noisy_requests_tell_nothing() -> None:
    few = judge_trend(_records([100.0] * 14))
    assert few == SteadinessResult(
        Steadiness.UNKNOWN,
        "7 requests have a TTFT, but 8 are needed on each side; 7 requests have an ITL, but 8 are needed on each side",
    )
    noisy = judge_trend(_records(_noisy(random.Random(3), 40, 100, 1.0)))
    assert noisy.steadiness is Steadiness.UNKNOWN
    assert judge_trend([]).steadiness is Steadiness.UNKNOWN


@pytest.mark.parametrize("level", [70, 140])
def test_a_level_that_seems_to_differ_but_may_not_is_not_told(level: float) -> None:
    rng = random.Random(6)
    found = judge_trend(_records([*_noisy(rng, 20, 100, 0.4), *_noisy(rng, 20, level, 0.4)]))
    assert found.steadiness is Steadiness.UNKNOWN
    assert "TTFT was" in found.reason


def test_what_was_not_streamed_is_judged_by_its_whole_latency() -> None:
    whole = [replace(record, time_to_first_token=None, inter_token_latency=None) for record in _records([100.0] * 40)]
    found = judge_trend(whole)
    assert found.steadiness is Steadiness.STEADY and found.reason.startswith("E2E was 1 times")


def test_answers_of_one_token_are_judged_by_their_first_and_failures_not_at_all() -> None:
    records = _records([100.0] * 40, itl=None)
    failed = [RequestRecord(i * MS, (i + 1) * MS, "HTTP 500", *[None] * 5) for i in range(100)]
    assert judge_trend([*failed, *records]).steadiness is Steadiness.STEADY
    assert judge_trend(failed).steadiness is Steadiness.UNKNOWN


def _warm_up(cold: int, slots: int, count: int) -> SteadinessResult:
    """Of a server whose first ``cold`` prompts take ten times as long."""
    rng = random.Random(4)
    warm = drawn(rng, count + 40 * slots, prefill_ms=50)
    requests = [replace(request, prefill_ms=500) for request in warm[:cold]] + warm[cold:]
    warm_up = closed_loop(requests[:count], slots).records
    measured = closed_loop(requests[count:], slots).records
    found = closed_loop_phases(measured, slots)
    assert isinstance(found, Phases)
    return judge_warm_up(closed_loop_phases(warm_up, slots), warm_up, sent_in(measured, found.steady))


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_a_warm_up_is_judged_by_its_later_half_against_the_measured_part(slots: int) -> None:
    count = 2 * warm_up_needed(slots)
    assert _warm_up(0, slots, count).steadiness is Steadiness.STEADY
    assert _warm_up(slots, slots, count).steadiness is Steadiness.STEADY  # its beginning may be cold
    cold = _warm_up(count, slots, count)
    assert cold.steadiness is Steadiness.NOT_STEADY
    assert "TTFT was 0." in cold.reason and "in the measured part as late in the warm-up" in cold.reason


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_a_warm_up_of_as_many_requests_as_it_says_is_long_enough_to_be_compared(slots: int) -> None:
    enough = _warm_up(0, slots, warm_up_needed(slots))
    assert "ITL was" in enough.reason and "needed" not in enough.reason
    short = _warm_up(0, slots, max(4, slots))  # what a load without a number has
    assert short.steadiness is Steadiness.UNKNOWN and "99 %" not in short.reason


def test_a_queue_that_grows_is_not_steady() -> None:
    records = closed_loop([Request(50 + i, 5, 20) for i in range(100)], 1).records
    assert judge_trend(records).steadiness is Steadiness.NOT_STEADY

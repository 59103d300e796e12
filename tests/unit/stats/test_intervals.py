from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st

from trtx.stats.intervals import (
    Interval,
    expected_margin,
    mean_interval,
    paired_ratio_interval,
    per_interval,
    ratio_interval,
    relative_spread,
    trials_needed,
)

pytestmark = pytest.mark.slow

# Student's own data of 1908: hours of sleep that ten people gained with each of two drugs.
FIRST = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
FIRST_RATIOS, SECOND_RATIOS = [math.exp(hours) for hours in FIRST], [math.exp(hours) for hours in SECOND]

positive = st.floats(0.1, 1000)
trials = st.lists(positive, min_size=2, max_size=12)
wide_apart = st.tuples(trials, trials).filter(lambda sides: min(np.ptp(np.log(side)) for side in sides) > 1e-3)


def _logs(interval: Interval | None) -> list[float]:
    assert interval is not None
    return [math.log(interval.low), math.log(interval.high)]


def test_students_data_have_the_intervals_of_the_textbooks() -> None:
    of_mean = mean_interval(FIRST)
    assert of_mean is not None
    assert (of_mean.low, of_mean.high) == pytest.approx((-0.5297804, 2.0297804), abs=1e-6)
    assert _logs(paired_ratio_interval(FIRST_RATIOS, SECOND_RATIOS)) == pytest.approx(
        [-2.4598858, -0.7001142], abs=1e-6
    )
    assert _logs(ratio_interval(FIRST_RATIOS, SECOND_RATIOS)) == pytest.approx([-3.3654832, 0.2054832], abs=1e-6)


@given(wide_apart, st.floats(0.5, 0.999))
@example(([1.0, 2.0], [1.0, 66.0]), 0.9986655070457029)
@example(([1.0, 2.0], [1.0, 57.0]), 0.9986655070457029)
def test_a_ratio_is_scipys_welch_on_logarithms(sides: tuple[list[float], list[float]], confidence: float) -> None:
    candidate, baseline = sides
    expected = scipy.stats.ttest_ind(np.log(candidate), np.log(baseline), equal_var=False)
    found = ratio_interval(candidate, baseline, confidence)
    low, high = expected.confidence_interval(confidence)
    assert found is not None
    with np.errstate(divide="ignore"):  # a low end below the least double is 0
        ends = np.log([found.low, found.high])
    # Beyond e**700 either way an end is as far off as a double can say.
    assert np.clip(ends, -700, 700) == pytest.approx(np.clip([low, high], -700, 700), rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=12))
def test_a_ratio_of_pairs_is_scipys_t_of_their_logarithms(pairs: list[tuple[float, float]]) -> None:
    candidate, baseline = zip(*pairs, strict=True)
    logs = np.log(candidate) - np.log(baseline)
    half = scipy.stats.t.ppf(0.975, len(pairs) - 1) * scipy.stats.sem(logs)
    expected = [logs.mean() - half, logs.mean() + half]
    assert _logs(paired_ratio_interval(candidate, baseline)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(trials, trials)
def test_a_ratio_the_other_way_round_is_the_inverse(candidate: list[float], baseline: list[float]) -> None:
    found, inverse = ratio_interval(candidate, baseline), ratio_interval(baseline, candidate)
    assert found and inverse
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (1 / inverse.estimate, 1 / inverse.high, 1 / inverse.low), rel=1e-9
    )


@given(trials, trials, st.floats(0.01, 100))
def test_a_ratio_knows_no_unit_and_moves_with_the_candidate(
    candidate: list[float], baseline: list[float], factor: float
) -> None:
    found = ratio_interval(candidate, baseline)
    assert found
    same = ratio_interval([1000 * value for value in candidate], [1000 * value for value in baseline])
    moved = ratio_interval([factor * value for value in candidate], baseline)
    assert same and moved
    assert (same.low, same.high) == pytest.approx((found.low, found.high), rel=1e-9)
    assert (moved.low, moved.high) == pytest.approx((factor * found.low, factor * found.high), rel=1e-9)


@given(trials, trials, st.floats(0.5, 0.99))
def test_more_confidence_is_a_wider_interval_around_the_same_estimate(
    candidate: list[float], baseline: list[float], confidence: float
) -> None:
    narrow = ratio_interval(candidate, baseline, confidence)
    wide = ratio_interval(candidate, baseline, per_interval(confidence, 3))
    assert narrow and wide and narrow.estimate == wide.estimate
    assert wide.low <= narrow.low <= narrow.estimate <= narrow.high <= wide.high
    assert narrow.estimate in narrow


@pytest.mark.parametrize("values", [[], [5.0]])
def test_one_trial_has_no_interval(values: list[float]) -> None:
    assert mean_interval(values) is None
    assert ratio_interval(values, [1.0, 2.0]) is None
    assert ratio_interval([1.0, 2.0], values) is None
    assert paired_ratio_interval(values, values) is None
    assert relative_spread(values) is None


def test_what_has_no_ratio_is_an_error_and_no_number() -> None:
    with pytest.raises(ValueError):
        ratio_interval([1.0, 0.0], [1.0, 2.0])
    with pytest.raises(ValueError):
        paired_ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0])


def test_pairs_leave_out_what_slows_both_sides() -> None:
    rounds = [1.0, 3.0, 0.5, 2.0]
    slower = [1.05 * of_round * noise for of_round, noise in zip(rounds, (1.001, 0.999, 1.002, 0.998), strict=True)]
    paired, independent = paired_ratio_interval(slower, rounds), ratio_interval(slower, rounds)
    assert paired and independent
    assert paired.low > 1.04 and paired.high < 1.06
    assert independent.low < 1 < independent.high


def test_the_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Of 1,500 experiments with few trials, and sides whose spread and number differ as Welch's test wants them."""
    draw = random.Random(1)
    experiments, covered = 1500, {"mean": 0, "ratio": 0, "pairs": 0}
    for _ in range(experiments):
        few = [draw.gauss(10, 2) for _ in range(4)]
        candidate = [1.1 * math.exp(draw.gauss(0, 0.2)) for _ in range(3)]
        baseline = [math.exp(draw.gauss(0, 0.02)) for _ in range(10)]
        rounds = [math.exp(draw.gauss(0, 0.5)) for _ in range(3)]
        slower = [1.1 * value * math.exp(draw.gauss(0, 0.02)) for value in rounds]
        found = (mean_interval(few), ratio_interval(candidate, baseline), paired_ratio_interval(slower, rounds))
        for name, truth, interval in zip(covered, (10, 1.1, 1.1), found, strict=True):
            covered[name] += interval is not None and truth in interval
    for name, count in covered.items():
        assert count / experiments == pytest.approx(0.95, abs=0.015), name


def test_intervals_of_one_family_hold_all_at_once() -> None:
    draw = random.Random(2)
    experiments, of_family = 250, 10
    all_held = 0
    for _ in range(experiments):
        sides = [[[math.exp(draw.gauss(0, 0.1)) for _ in range(5)] for _ in "ab"] for _ in range(of_family)]
        found = [ratio_interval(a, b, per_interval(0.95, of_family)) for a, b in sides]
        all_held += all(interval is not None and 1 in interval for interval in found)
    assert 0.93 <= all_held / experiments <= 0.985  # of single ones at 95 %, 0.6 hold all at once


@pytest.mark.parametrize(("effect", "needed"), [(0.5, 64), (0.8, 26), (1.0, 17)])
def test_the_number_of_trials_is_that_of_cohens_tables(effect: float, needed: int) -> None:
    """Of a two-sided test at 0.05 with power 0.8: the limit is so many standard deviations away."""
    assert trials_needed(0.1, math.exp(0.1 * effect)) == needed


@example(0.1875, 1.01, 0.998046875)  # more than 10,000
@given(st.floats(0.001, 0.3), st.floats(1.01, 1.5), st.floats(0.8, 0.999))
def test_the_number_of_trials_suffices_and_one_less_does_not(spread: float, margin: float, confidence: float) -> None:
    """By the power of the t test itself, of scipy's noncentral t, which the usual formula comes close to."""
    needed = trials_needed(spread, margin, confidence)

    def power(count: int) -> float:
        freedom, distance = 2 * count - 2, math.log(margin) / (spread * math.sqrt(2 / count))
        reach = scipy.stats.t.ppf((1 + confidence) / 2, freedom)
        return float(scipy.stats.nct.sf(reach, freedom, distance))

    if needed is None:
        assert power(10_000) < 0.8
    else:
        assert not power(needed) < 0.8  # no number far off
        assert needed == 2 or power(needed - 1) < 0.8


@given(st.floats(0.001, 0.3), st.floats(1.01, 1.3), st.floats(0.0, 0.3))
def test_more_spread_and_a_closer_limit_take_more_trials(spread: float, margin: float, more: float) -> None:
    needed = trials_needed(spread, margin) or math.inf
    assert (trials_needed(spread * (1 + more), margin) or math.inf) >= needed
    assert (trials_needed(spread, 1 + (margin - 1) / (1 + more)) or math.inf) >= needed


@given(trials)
def test_an_equal_candidate_has_the_margin_that_was_expected(values: list[float]) -> None:
    spread, found = relative_spread(values), ratio_interval(values, values)
    assert spread is not None and found
    margin = expected_margin(spread, (len(values), len(values)))
    assert margin == math.inf or (found.high, 1 / found.low) == pytest.approx((margin, margin), rel=1e-6)


def test_a_side_of_one_trial_resolves_nothing() -> None:
    assert expected_margin(0.0, (1, 50)) == math.inf

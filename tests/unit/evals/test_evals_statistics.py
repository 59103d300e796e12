"""Intervals of scores: against published examples, and what holds for all of them."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.evals import statistics

BITS = st.lists(st.integers(0, 1), min_size=1, max_size=60)
PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)


def test_wilsons_interval_is_that_of_newcombes_first_paper() -> None:
    """Newcombe (1998, Statistics in Medicine 17:857), table I: 81 of 263 and 1 of 29."""
    assert statistics.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert statistics.wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_paired_difference_is_that_of_newcombes_paper() -> None:
    """Statistics in Medicine 17:2635, method 10: right in both 36, first alone 12, second alone 2, neither 0."""
    pairs = [(1, 1)] * 36 + [(1, 0)] * 12 + [(0, 1)] * 2
    found = statistics.difference_interval([a for a, _ in pairs], [b for _, b in pairs])
    assert found is not None and (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)


@given(BITS)
def test_a_share_lies_in_its_interval_which_is_never_a_point(values: list[int]) -> None:
    found = statistics.share_interval(values)
    assert found is not None
    assert 0 <= found.low <= found.estimate <= found.high <= 1 and found.low < found.high


@given(PAIRS)
def test_a_difference_lies_in_its_interval_and_turns_about_with_its_sides(pairs: list[tuple[int, int]]) -> None:
    first, second = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    there, back = statistics.difference_interval(first, second), statistics.difference_interval(second, first)
    assert there is not None and back is not None
    assert there.low <= there.estimate <= there.high and there.low < there.high
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


@given(BITS, st.integers(2, 5))
def test_more_of_the_same_samples_narrow_an_interval(values: list[int], times: int) -> None:
    few, many = statistics.share_interval(values), statistics.share_interval(values * times)
    assert few is not None and many is not None and many.high - many.low < few.high - few.low


@settings(deadline=None)  # the first call imports numpy
@given(st.lists(st.floats(-100, 100), min_size=10, max_size=30))
def test_a_bootstrap_is_the_same_each_time_and_stays_within_its_samples(values: list[float]) -> None:
    found, again = statistics.mean_interval(values), statistics.mean_interval(values)
    assert found is not None and found == again
    assert found.estimate == pytest.approx(fmean(values), abs=1e-9)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9


def test_too_few_samples_have_no_bootstrap_and_none_have_no_share() -> None:
    assert statistics.mean_interval([0.5] * 9) is None
    assert statistics.bootstrap_interval([0.5] * 9, max, resamples=5) is None
    assert statistics.share_interval([]) is None and statistics.difference_interval([], []) is None


def test_a_metric_over_all_samples_is_drawn_with_its_own_formula() -> None:
    found = statistics.bootstrap_interval(list(range(20)), lambda drawn: float(max(drawn)), resamples=50)
    assert found is not None and found.estimate == 19 and found.low <= found.high == 19


def test_tasks_of_a_group_are_drawn_by_themselves() -> None:
    found = statistics.strata_interval([[1.0] * 20, [0.0] * 5], [0.5, 0.5])
    assert found is not None and (found.low, found.estimate, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_difference_of_ratios_is_that_of_the_scores_and_its_pairs_narrow_it() -> None:
    """Texts of very different difficulty, each 1 % of its log-likelihood harder for the candidate."""
    baseline = [(-40.0 * (1 + number % 7), 10.0 + number % 3) for number in range(60)]
    candidate = [(logprob * 1.01, size) for logprob, size in baseline]
    sums = [sum(part) for part in zip(*baseline, strict=True)]
    bits = -sums[0] / sums[1] / math.log(2)
    found = statistics.ratio_difference_interval(candidate, baseline, "bits_per_byte")
    assert found is not None and found.estimate == pytest.approx(0.01 * bits)
    assert 0 < found.low < found.estimate < found.high < 0.02 * bits
    of_exp = statistics.ratio_difference_interval(candidate, baseline, "weighted_perplexity")
    assert of_exp is not None
    assert of_exp.estimate == pytest.approx(math.exp(-1.01 * sums[0] / sums[1]) - math.exp(-sums[0] / sums[1]))
    same = statistics.ratio_difference_interval(baseline, baseline, "weighted_perplexity")
    assert same is not None and (same.low, same.estimate, same.high) == (0, 0, 0)
    assert statistics.ratio_difference_interval(candidate[:9], baseline[:9], "bits_per_byte") is None


@pytest.mark.parametrize("intervals", [1, 5, 60, 600, 6000])
def test_many_intervals_that_hold_together_are_as_wide_as_the_normal_ones(intervals: int) -> None:
    """Of a mean of 400 values, where both are right; their family's level lies far beyond 1,000 resamples."""
    draw = random.Random(3)
    values = [draw.gauss(0.5, 0.2) for _ in range(400)]
    confidence = 1 - 0.05 / intervals
    found = statistics.mean_interval(values, confidence)
    assert found is not None
    error = pstdev(values) / math.sqrt(len(values))
    assert found.high - found.low == pytest.approx(2 * error * NormalDist().inv_cdf((1 + confidence) / 2), rel=0.12)

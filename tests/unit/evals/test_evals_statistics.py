"""Intervals of scores: against published examples, and what holds for all of them."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.evals import statistics
from trtx.evals.statistics import NoInterval
from trtx.stats.intervals import Interval

pytestmark = pytest.mark.slow

BITS = st.lists(st.integers(0, 1), min_size=1, max_size=60)
PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)


def test_wilsons_interval_is_that_of_newcombes_first_paper() -> None:
    """Newcombe (1998, Statistics in Medicine 17:857), table I: 81 of 263 and 1 of 29."""
    assert statistics.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert statistics.wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_paired_difference_is_that_of_newcombes_paper() -> None:
    """Statistics in Medicine 17:2635, method 10: right in both 36, first alone 12, second alone 2, neither 0."""
    pairs = [(1, 1)] * 36 + [(1, 0)] * 12 + [(0, 1)] * 2
    found = interval(statistics.difference_interval([a for a, _ in pairs], [b for _, b in pairs]))
    assert (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)


@given(BITS)
def test_a_share_lies_in_its_interval_which_is_never_a_point(values: list[int]) -> None:
    found = statistics.share_interval(values)
    assert found is not None
    assert 0 <= found.low <= found.estimate <= found.high <= 1 and found.low < found.high


@given(PAIRS)
def test_a_difference_lies_in_its_interval_and_turns_about_with_its_sides(pairs: list[tuple[int, int]]) -> None:
    first, second = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    there, back = (interval(statistics.difference_interval(*sides)) for sides in ((first, second), (second, first)))
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


def interval(found: Interval | NoInterval) -> Interval:
    assert isinstance(found, Interval), found
    return found


def reason(found: Interval | NoInterval) -> str:
    assert isinstance(found, NoInterval), found
    return found.reason


def test_too_few_samples_have_no_bootstrap_and_none_have_no_share() -> None:
    assert statistics.mean_interval([0.5] * 9) is None and statistics.share_interval([]) is None
    few = "are too few for an interval; ask 10 or more"
    assert reason(statistics.score_interval([0.5, 0.6] * 4)) == f"8 samples {few}"
    assert reason(statistics.bootstrap_interval([0.5] * 9, max, resamples=5)) == f"9 samples {few}"
    assert reason(statistics.difference_interval([], [])) == f"0 pairs {few}"
    assert reason(statistics.difference_interval([0.5] * 9, [0.4] * 9)) == f"9 pairs {few}"


@pytest.mark.parametrize("count", [10, 200, 5000])
def test_samples_that_are_all_worth_the_same_have_no_interval(count: int) -> None:
    """Of zeros and ones Wilson's says what it may be; of 0.5 each nobody knows how far off another is."""
    told = f"all {count} samples are worth 0.5, which does not show how far off others may be"
    assert reason(statistics.score_interval([0.5] * count)) == told
    assert interval(statistics.score_interval([1.0] * count)) == statistics.share_interval([1.0] * count)
    alike = reason(statistics.bootstrap_interval([("a", "b")] * count, lambda drawn: 3.0, resamples=20))
    assert alike == f"{count} samples are too much alike to show how far off others may be"
    assert "pairs are alike" in reason(statistics.difference_interval([0.5] * count, [0.5] * count))
    texts = [(-30.0, 10.0)] * count
    assert "pairs are alike" in reason(statistics.ratio_difference_interval(texts, texts, "bits_per_byte"))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1).map(lambda one: round(one, 3)), min_size=10, max_size=40), st.integers(0, 40))
def test_no_interval_of_a_score_is_a_point(values: list[float], alike: int) -> None:
    found = statistics.score_interval([*values, *[values[0]] * alike])
    if isinstance(found, NoInterval):
        assert len(set(values)) == 1 and not statistics.is_binary(values)
    else:
        assert 0 <= found.low <= found.estimate <= found.high <= 1 and found.low < found.high


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=10, max_size=30), st.integers(0, 40))
def test_no_interval_of_a_difference_is_a_point(pairs: list[tuple[float, float]], alike: int) -> None:
    rounded = [(round(one, 3), round(other, 3)) for one, other in pairs] + [(0.5, 0.5)] * alike
    found = statistics.difference_interval([one for one, _ in rounded], [other for _, other in rounded])
    if isinstance(found, NoInterval):
        assert len(set(rounded)) == 1
    else:
        assert found.low <= found.estimate <= found.high and found.low < found.high


def test_one_sample_that_differs_does_not_make_a_score_surer_than_none() -> None:
    """195 of 200 right, five a little wrong: others may be wrong altogether."""
    found = interval(statistics.score_interval([1.0] * 195 + [0.0, 0.9, 0.9, 0.9, 0.9]))
    right = statistics.share_interval([1] * 200)
    assert right is not None and found.low < right.low and found.high == 1
    drawn = statistics.mean_interval([1.0] * 195 + [0.0, 0.9, 0.9, 0.9, 0.9])
    assert drawn is not None and found.low < drawn.low - 0.005
    equal = interval(statistics.difference_interval([0.1, 0.9] * 100, [0.1, 0.9] * 100))
    worse = interval(statistics.difference_interval([0.1, 0.9] * 99 + [0.1, 0.8], [0.1, 0.9] * 100))
    assert worse.low < equal.low < 0 < equal.high


def test_equal_pairs_leave_open_as_much_as_equal_pairs_of_zeros_and_ones_do() -> None:
    right = [1.0] * 200
    of_shares = interval(statistics.difference_interval(right, right))
    values = [0.25, 0.75] * 100  # half as far apart
    found = interval(statistics.difference_interval(values, values))
    assert found.estimate == 0 and (found.low, found.high) == pytest.approx((of_shares.low / 2, of_shares.high / 2))
    texts = [(-10.0 - number, 10.0) for number in range(200)]
    bits = interval(statistics.ratio_difference_interval(texts, texts, "bits_per_byte"))
    spread = pstdev([number / 10 for number in range(200)])
    assert bits.estimate == 0 and bits.high == pytest.approx(-bits.low)
    assert bits.high == pytest.approx(of_shares.high * spread / math.log(2))
    more = interval(statistics.ratio_difference_interval(texts * 10, texts * 10, "bits_per_byte"))
    assert 0 < more.high < bits.high / 8


def test_a_metric_over_all_samples_is_drawn_with_its_own_formula() -> None:
    found = interval(statistics.bootstrap_interval(list(range(20)), lambda drawn: float(max(drawn)), resamples=50))
    assert found.estimate == 19 and found.low <= found.high == 19


def test_tasks_of_a_group_are_drawn_by_themselves() -> None:
    draw = random.Random(5)
    easy, hard = ([draw.gauss(mean, 0.01) for _ in range(60)] for mean in (0.9, 0.1))
    found = interval(statistics.strata_interval([easy, hard], [0.5, 0.5]))
    assert found.estimate == pytest.approx(0.5, abs=0.01) and found.high - found.low < 0.01  # not those of a mixture


def test_a_group_whose_tasks_are_all_right_or_all_wrong_has_the_intervals_of_its_tasks() -> None:
    found = interval(statistics.strata_interval([[1.0] * 20, [0.0] * 5], [0.5, 0.5]))
    right, wrong = statistics.share_interval([1] * 20), statistics.share_interval([0] * 5)
    assert right is not None and wrong is not None
    assert (found.estimate, found.low, found.high) == pytest.approx((0.5, right.low / 2, 0.5 + wrong.high / 2))
    told = reason(statistics.strata_interval([[0.5] * 20, [0.1, 0.7] * 10], [0.5, 0.5]))
    assert told.startswith("of a task of the group, all 20 samples are worth 0.5")


def test_a_difference_of_ratios_is_that_of_the_scores_and_its_pairs_narrow_it() -> None:
    """Texts of very different difficulty, each 1 % of its log-likelihood harder for the candidate."""
    baseline = [(-40.0 * (1 + number % 7), 10.0 + number % 3) for number in range(60)]
    candidate = [(logprob * 1.01, size) for logprob, size in baseline]
    sums = [sum(part) for part in zip(*baseline, strict=True)]
    bits = -sums[0] / sums[1] / math.log(2)
    found = interval(statistics.ratio_difference_interval(candidate, baseline, "bits_per_byte"))
    assert found.estimate == pytest.approx(0.01 * bits)
    assert 0 < found.low < found.estimate < found.high < 0.02 * bits
    of_exp = interval(statistics.ratio_difference_interval(candidate, baseline, "weighted_perplexity"))
    assert of_exp.estimate == pytest.approx(math.exp(-1.01 * sums[0] / sums[1]) - math.exp(-sums[0] / sums[1]))
    same = interval(statistics.ratio_difference_interval(baseline, baseline, "weighted_perplexity"))
    assert same.low < same.estimate == 0 < same.high
    assert "9 pairs are too few" in reason(
        statistics.ratio_difference_interval(candidate[:9], baseline[:9], "bits_per_byte")
    )


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

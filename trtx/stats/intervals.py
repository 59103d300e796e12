"""Confidence intervals over trials, of a mean and of the ratio of two means, and the number of trials required.

A trial is one independent measurement, so intervals are over trials. A single trial has no interval: the functions
return None, never a width of zero. Ratios are computed on logarithms, on which slower and faster by the same factor are
equally far from 1: the interval of b / a is the inverse of that of a / b. The estimate is the ratio of geometric means.

Sources: Student (1908) for the mean and, applied to differences, for pairs; Welch (1947) for two samples of unequal
variance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.8  # the convention of Cohen (1988): four of five gates of an equal build pass
_FAR = 10  # in multiples of an interval's reach
_MOST_TRIALS = 10_000
_LARGEST = 700.0  # e^710 overflows a float


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval, in the unit of the estimate."""

    estimate: float
    low: float
    high: float
    confidence: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def per_interval(confidence: float, count: int) -> float:
    """The confidence of each of ``count`` intervals that together hold with ``confidence`` (Bonferroni).

    Holm's procedure rejects more often, but gives no intervals: the printed intervals would not be those judged.
    """
    return 1 - (1 - confidence) / count


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean of independent ``values``; None for fewer than two."""
    if len(values) < 2:
        return None
    half = _student(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return Interval(mean, mean - half, mean + half, confidence)


def ratio_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """The interval of candidate / baseline from independent trials: Welch's t interval on logarithms.

    None if a side has fewer than two trials. Raises ValueError for a value that isn't positive, since it has no ratio.
    """
    candidate_logs, baseline_logs = _logs(candidate), _logs(baseline)
    if min(len(candidate_logs), len(baseline_logs)) < 2:
        return None
    variances = [statistics.variance(logs) / len(logs) for logs in (candidate_logs, baseline_logs)]
    difference = statistics.fmean(candidate_logs) - statistics.fmean(baseline_logs)
    half = _welch_half_width(variances, [len(candidate_logs), len(baseline_logs)], confidence)
    return _ratios(Interval(difference, difference - half, difference + half, confidence))


def paired_ratio_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """The interval of candidate / baseline from blocks that measured both: Student's interval of the mean log ratio.

    Effects that differ between blocks but slow both sides alike cancel out. None for fewer than two blocks. Raises
    ValueError for sides of unequal length, or for a value that isn't positive.
    """
    pairs = zip(_logs(candidate), _logs(baseline), strict=True)
    found = mean_interval([of_candidate - of_baseline for of_candidate, of_baseline in pairs], confidence)
    return None if found is None else _ratios(found)


def relative_spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the logarithms, which approximates a small coefficient of variation. None for fewer than
    two.
    """
    return statistics.stdev(_logs(values)) if len(values) > 1 else None


def expected_margin(spread: float, trials: tuple[int, int], confidence: float = CONFIDENCE) -> float:
    """The factor by which the upper end of a ratio's interval will exceed the estimate, and the lower end fall below
    it.

    ``trials`` gives the numbers of candidate and baseline trials, both of which have this :func:`relative_spread`.
    Infinite if either is one.
    """
    if min(trials) < 2:
        return math.inf
    half = _welch_half_width([spread**2 / count for count in trials], list(trials), confidence)
    return _exp(half)


def trials_needed(spread: float, margin: float, confidence: float = CONFIDENCE, power: float = POWER) -> int | None:
    """Trials per side with which a candidate equal to its baseline passes a limit with probability ``power``.

    ``margin`` is the limit as a factor above 1. The power of a non-inferiority test on logarithms is that of the t
    test: the noncentral t distribution with 2n − 2 degrees of freedom, at ln margin / (spread · √(2/n)) (Julious 2004,
    Statistics in Medicine 23:1921). None if more than 10,000 trials are required.
    """

    def suffices(count: int) -> bool:
        from scipy.stats import nct

        freedom = 2 * count - 2
        error = spread * math.sqrt(2 / count)
        distance = math.log(margin) / error if error else math.inf
        reach = _student(freedom, confidence)
        # scipy returns no number that far out. Then it only matters whether the distance exceeds the reach.
        found = float(nct.sf(reach, freedom, distance)) if distance < _FAR * reach else math.nan
        return distance > reach if math.isnan(found) else found >= power

    if not suffices(_MOST_TRIALS):
        return None
    low, high = 2, _MOST_TRIALS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def _exp(log: float) -> float:
    """e^``log``, or infinity if a float can't hold it: two extremely different values have an interval that wide."""
    return math.exp(log) if log < 700 else math.inf


def _welch_half_width(variances: Sequence[float], counts: Sequence[int], confidence: float) -> float:
    """Half-width of Welch's interval. ``variances`` are those of the two means, ``counts`` their numbers of values.

    Degrees of freedom follow Welch and Satterthwaite.
    """
    total = sum(variances)
    if total == 0:
        return 0.0
    # As shares of the total, because the square of a small variance would underflow.
    shares = [variance / total for variance in variances]
    freedom = 1 / sum(share**2 / (count - 1) for share, count in zip(shares, counts, strict=True))
    return _student(freedom, confidence) * math.sqrt(total)


def _ratios(logs: Interval) -> Interval:
    """The interval of a ratio from that of its logarithm. Ends are limited to what a float can hold."""
    estimate, low, high = (math.exp(min(end, _LARGEST)) for end in (logs.estimate, logs.low, logs.high))
    return Interval(estimate, low, high, logs.confidence)


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def _student(freedom: float, confidence: float) -> float:
    """Number of standard errors that a two-sided interval extends to each side."""
    return _student_quantile(freedom, (1 + confidence) / 2)


def _student_quantile(freedom: float, probability: float) -> float:
    from scipy.special import stdtrit  # not scipy.stats, which takes a second to import

    return float(stdtrit(freedom, probability))

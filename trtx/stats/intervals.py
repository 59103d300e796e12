"""Confidence intervals over trials: of a mean, and of the ratio of two means; and how many trials it takes.

A trial is one independent measurement, so an interval is over trials. One trial has none: None, never a width of zero.
Ratios are taken on logarithms, where slower by a factor and faster by it are equally far from 1: the interval of b / a
is the inverse of that of a / b. Its estimate is the ratio of geometric means.

Sources: Student (1908) for the mean and, on differences, for pairs; Welch (1947) for two samples of unequal variance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.8  # the convention of Cohen (1988): four of five gates of an equal build get their verdict
_FAR = 10  # times the reach of an interval
_MOST_TRIALS = 10_000
_LARGEST = 700.0  # e^710 is no float any more


@dataclass(frozen=True, slots=True)
class Interval:
    """Two-sided, in the unit of what was estimated."""

    estimate: float
    low: float
    high: float
    confidence: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def per_interval(confidence: float, count: int) -> float:
    """The confidence of each of ``count`` intervals that all hold at once with ``confidence`` (Bonferroni).

    Holm's procedure rejects more, but has no intervals to show: what is printed would not be what was judged.
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
    """Of candidate / baseline, of independent trials: Welch's t interval on logarithms.

    None where a side has fewer than two trials. ValueError for a value that is not above 0: it has no ratio.
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
    """Of candidate / baseline, of rounds that measured both: Student's interval of the mean logarithm of their ratios.

    What differs from round to round, and slows both sides alike, cancels out. None for fewer than two rounds.
    ValueError for sides of unequal length, or a value that is not above 0.
    """
    pairs = zip(_logs(candidate), _logs(baseline), strict=True)
    found = mean_interval([of_candidate - of_baseline for of_candidate, of_baseline in pairs], confidence)
    return None if found is None else _ratios(found)


def relative_spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the logarithms: for a small one, the coefficient of variation. None for fewer than two."""
    return statistics.stdev(_logs(values)) if len(values) > 1 else None


def expected_margin(spread: float, trials: tuple[int, int], confidence: float = CONFIDENCE) -> float:
    """By which factor the upper end of a ratio's interval will lie above its estimate, and the lower one below it.

    For ``trials`` of candidate and baseline that both have this :func:`relative_spread`; infinite for one trial.
    """
    if min(trials) < 2:
        return math.inf
    half = _welch_half_width([spread**2 / count for count in trials], list(trials), confidence)
    return _exp(half)


def trials_needed(spread: float, margin: float, confidence: float = CONFIDENCE, power: float = POWER) -> int | None:
    """Trials on each side with which a candidate equal to its baseline passes a limit with probability ``power``.

    ``margin`` is the limit as a factor above 1. The power of a non-inferiority test on logarithms is that of the t test
    itself: the noncentral t distribution with 2n − 2 degrees of freedom, at ln margin / (spread · √(2/n))
    (Julious 2004, Statistics in Medicine 23:1921). None where more than 10,000 would be needed.
    """

    def suffices(count: int) -> bool:
        from scipy.stats import nct

        freedom = 2 * count - 2
        error = spread * math.sqrt(2 / count)
        distance = math.log(margin) / error if error else math.inf
        reach = _student(freedom, confidence)
        # So far off scipy gives no number; what decides there is on which side of the reach it lies.
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
    """Infinite where a float could not hold it: two wild values have an interval that wide."""
    return math.exp(log) if log < 700 else math.inf


def _welch_half_width(variances: Sequence[float], counts: Sequence[int], confidence: float) -> float:
    """``variances`` of the two means, which are of so many values. Degrees of freedom: Welch and Satterthwaite."""
    total = sum(variances)
    if total == 0:
        return 0.0
    # As shares of the total: the square of a small variance would underflow.
    shares = [variance / total for variance in variances]
    freedom = 1 / sum(share**2 / (count - 1) for share, count in zip(shares, counts, strict=True))
    return _student(freedom, confidence) * math.sqrt(total)


def _ratios(logs: Interval) -> Interval:
    """Of two trials that have nothing in common the interval is wider than floats are: its end is their last."""
    estimate, low, high = (math.exp(min(end, _LARGEST)) for end in (logs.estimate, logs.low, logs.high))
    return Interval(estimate, low, high, logs.confidence)


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def _student(freedom: float, confidence: float) -> float:
    """How many standard errors a two-sided interval reaches to each side."""
    return _student_quantile(freedom, (1 + confidence) / 2)


def _student_quantile(freedom: float, probability: float) -> float:
    from scipy.special import stdtrit  # not scipy.stats, which takes a second to import

    return float(stdtrit(freedom, probability))

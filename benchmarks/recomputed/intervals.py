"""The intervals of docs/verdicts.md a second time, Student's distribution included."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from recomputed.figures import mean

CONFIDENCE = 0.95


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's (1908); None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def ratio_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float, *, paired: bool
) -> tuple[float, float, float] | None:
    """Ratio of geometric means and its ends: Welch's interval on logarithms, or Student's of pairs."""
    a, b = [math.log(value) for value in candidate], [math.log(value) for value in baseline]
    if min(len(a), len(b)) < 2 or (paired and len(a) != len(b)):
        return None
    if paired:
        differences = [x - y for x, y in zip(a, b, strict=True)]
        middle, ends = mean(differences), mean_interval(differences, confidence)
        assert ends is not None
        return math.exp(middle), math.exp(ends[0]), math.exp(ends[1])
    errors = [statistics.variance(logs) / len(logs) for logs in (a, b)]
    middle, error = mean(a) - mean(b), sum(errors)
    if not error:
        return math.exp(middle), math.exp(middle), math.exp(middle)
    freedom = error**2 / sum(one**2 / (len(logs) - 1) for one, logs in zip(errors, (a, b), strict=True))
    half = student(freedom, confidence) * math.sqrt(error)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def student(freedom: float, confidence: float) -> float:
    """How many standard errors a two-sided interval reaches to each side, by bisection."""
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > 1 - confidence:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _beyond(middle, freedom) > 1 - confidence else (low, middle)
    return high


def _beyond(t: float, freedom: float) -> float:
    """Probability of |T| > t: the regularized incomplete beta function (Abramowitz and Stegun 26.5.27, 26.7.1)."""
    x = freedom / (freedom + t * t)
    a, b = freedom / 2, 0.5
    if x > (a + 1) / (a + b + 2):  # where the continued fraction converges slowly: I_x(a, b) = 1 − I_(1−x)(b, a)
        return 1 - _incomplete_beta(t * t / (freedom + t * t), b, a)
    return _incomplete_beta(x, a, b)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """By its continued fraction 26.5.8, evaluated from a depth at which it has long converged."""
    if x == 0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tail = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        tail = 1 + odd / (1 + even / tail)
    return front / tail

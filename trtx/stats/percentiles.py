"""Percentiles, the number of samples required to state one, and the tail of a binomial distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache


@cache
def samples_needed(percentile: float) -> int:
    """Smallest number of independent samples of which at least two lie beyond the percentile with probability ≥ 0.99.

    With fewer samples, the value is effectively the maximum: 11, 64, 130 and 662 are needed for p50, p90, p95 and p99.
    """
    beyond = 1 - percentile / 100
    n = 2
    while (1 - beyond) ** n + n * beyond * (1 - beyond) ** (n - 1) > 0.01:
        n += 1
    return n


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile, interpolated linearly (numpy's and aiperf's default). ``samples`` must not be empty."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def binomial_tail(count: int, n: int, p: float) -> float:
    """The probability of ``count`` events, or a number further from n·p on the same side, in ``n`` independent trials.

    ``p`` is the probability of a single event, 0 < p < 1.
    """
    far = range(count, n + 1) if count >= n * p else range(count, -1, -1)
    log_n, log_p, log_not = math.lgamma(n + 1), math.log(p), math.log1p(-p)
    tail = 0.0
    for k in far:  # terms decrease from one to the next
        term = math.exp(log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_not)
        tail += term
        if term < 1e-12 * tail:
            break
    return min(1.0, tail)

"""Percentiles, how many samples it takes before one may be stated, and the tail of a binomial distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache


@cache
def samples_needed(percentile: float) -> int:
    """Smallest n of independent samples of which at least two lie beyond the percentile with probability ≥ 0.99.

    With fewer, the figure is the maximum, or next to it, under another name: 11, 64, 130 and 662 for p50, p90,
    p95 and p99.
    """
    beyond = 1 - percentile / 100
    n = 2
    while (1 - beyond) ** n + n * beyond * (1 - beyond) ** (n - 1) > 0.01:
        n += 1
    return n


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between neighbours (numpy's default, and aiperf's). ``samples`` is not empty."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def binomial_tail(count: int, n: int, p: float) -> float:
    """The chance of ``count`` of ``n`` independent events of chance ``p`` (0 < p < 1), or of one further from n p on
    the same side."""
    far = range(count, n + 1) if count >= n * p else range(count, -1, -1)
    log_n, log_p, log_not = math.lgamma(n + 1), math.log(p), math.log1p(-p)
    tail = 0.0
    for k in far:  # each is smaller than the one before
        term = math.exp(log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_not)
        tail += term
        if term < 1e-12 * tail:
            break
    return min(1.0, tail)

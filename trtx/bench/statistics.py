"""Percentiles, and how many samples it takes before one may be stated."""

from __future__ import annotations

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

"""Counts of a Prometheus histogram, as plain lists: the request path can't afford prometheus_client's objects."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from trtx.engine.served_family import ServedFamily

LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds in seconds for what happens once a token or a step."""


class BucketCounts:
    """Counts per bucket and the sum of values, as in a Prometheus histogram."""

    __slots__ = ("_buckets", "_counts", "_sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def of(self, family: ServedFamily, labels: tuple[str, ...] = ()) -> Any:
        """The histogram ``family`` with these counts, for a collector."""
        cumulative, total = [], 0
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return family.distribution(cumulative, self._sum, labels)

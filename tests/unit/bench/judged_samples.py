"""Cells to be judged, from requests or from the figures of their trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtx.bench.judge.sample import CellSample
from trtx.bench.metric_types import Figures
from trtx.bench.records import RequestRecord

LATENCIES = ("time_to_first_token", "inter_token_latency", "request_latency")


def request(number: int, ttft: float | None, *, itl: float | None = 10, osl: float | None = 100) -> RequestRecord:
    """One of 1 s, begun ``number`` s after the first; it failed where ``ttft``, in ms, is None."""
    start, end = number * 10**9, (number + 1) * 10**9
    if ttft is None:
        return RequestRecord(start, end, "HTTP 500", *[None] * 5)
    return RequestRecord(start, end, None, ttft, itl, 1000, 64, osl)


def of_requests(*trials: Sequence[RequestRecord], cell: str = "agg-c8", **said: Any) -> CellSample:
    """A cell whose trials have these requests."""
    figures = tuple(Figures.over([trial]) for trial in trials)
    return CellSample(cell=cell, device_count=2, figures=Figures.over(trials), trials=figures, **said)


def of_trials(
    name: str, values: Sequence[float], *, count: int = 1000, cell: str = "agg-c8", **said: Any
) -> CellSample:
    """A cell in whose trials one figure, and each statistic of it, came to ``values``, of ``count`` requests each."""
    return CellSample(
        cell=cell,
        device_count=2,
        figures=_figures(name, sum(values) / len(values), count * len(values)),
        trials=tuple(_figures(name, value, count) for value in values),
        **said,
    )


def _figures(name: str, value: float, count: int) -> Figures:
    of_it = {"count": count, **dict.fromkeys(("avg", "p50", "p90", "p99"), value)} if name in LATENCIES else value
    counts = {"request_count": count, "error_request_count": 0, "uncounted_request_count": 0, "request_error_rate": 0.0}
    return Figures({**counts, name: of_it})

"""The columns of every table, with their units, and how a number is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtx.bench import Distribution, samples_needed
from trtx.report.view import Row, RunView

MISSING = "–"
UNSURE = "~"  # before a percentile that has too few samples


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row. ``percentile`` is set where a figure needs a number of samples to be stated."""

    title: str
    group: str  # the header over it, with the unit where the title does not say it
    label: str  # its own header under that
    value: Callable[[Row], float | None]
    percentile: int | None = None
    samples: Callable[[Row], int] = lambda row: 0

    def is_sure(self, row: Row) -> bool:
        return self.percentile is None or not 0 < self.samples(row) < samples_needed(self.percentile)

    def text(self, row: Row) -> str:
        value = self.value(row)
        if value is None:
            return MISSING
        return number(value) if self.is_sure(row) else UNSURE + number(value)


def number(value: float) -> str:
    """Three significant digits, thousands apart: 0.123, 1.23, 12.3, 123, 12,346."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def columns(view: RunView) -> tuple[Column, ...]:
    """Throughput first, then latency: the order in which a reader decides."""
    return (
        Column("tokens/s", "tokens/s", "all", lambda row: row.rate("output_token_throughput")),
        Column("tokens/s/user", "tokens/s", "a user", lambda row: row.rate("output_token_throughput_per_user")),
        Column(f"tokens/s/{view.device}", "tokens/s", f"a {view.device}", lambda row: row.per_device),
        Column("requests/s", "requests/s", "all", lambda row: row.rate("request_throughput")),
        *_percentiles("TTFT", lambda row: row.latency("time_to_first_token")),
        *_percentiles("ITL", lambda row: row.latency("inter_token_latency")),
        *_percentiles("E2E", lambda row: row.latency("request_latency")),
        Column("ISL", "tokens", "ISL", lambda row: row.rate("input_sequence_length")),
        Column("OSL", "tokens", "OSL", lambda row: row.rate("output_sequence_length")),
        Column("duration", "time", "s", lambda row: row.rate("benchmark_duration")),
    )


def _percentiles(title: str, of: Callable[[Row], Distribution | None]) -> tuple[Column, ...]:
    def samples(row: Row) -> int:
        found = of(row)
        return found.count if found else 0

    def reads(name: str) -> Callable[[Row], float | None]:
        return lambda row: getattr(found, name) if (found := of(row)) else None

    group = f"{title}, ms"
    return (
        Column(f"{title} avg", group, "avg", reads("avg")),
        *(Column(f"{title} p{q}", group, f"p{q}", reads(f"p{q}"), q, samples) for q in (50, 90, 99)),
    )


def column_map(view: RunView) -> dict[str, Column]:
    return {column.title: column for column in columns(view)}


def requests_text(row: Row) -> str:
    """Succeeded requests, and failed ones when there are any."""
    if row.figures is None:
        return {"missing": "not measured", "failed": "no result"}.get(row.status, MISSING)
    failed = row.figures.error_request_count
    return f"{row.figures.request_count:,}" + (f" + {failed:,} failed" if failed else "")

"""The columns of all tables, derived from the metric records, and number formatting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trtx.bench import Metric, samples_needed
from trtx.bench.judge.sample import MetricColumn
from trtx.bench.metric_types import all_figures
from trtx.bench.metrics import Heading, error_request_count, request_count
from trtx.report.view import Part, Row, RunView
from trtx.stats.intervals import CONFIDENCE, Interval

MISSING = "–"
UNSURE = "~"  # prefix of a percentile with too few samples


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a metric: one of its percentiles or, without one, its value (mean)."""

    metric: Metric[Any]
    percentile: int | None
    device: str
    part: Part = "whole"

    @property
    def title(self) -> str:
        title = self.metric.title.format(device=self.device)
        return title if len(self.metric.columns) == 1 else f"{title} {self._statistic}"

    @property
    def label(self) -> str:
        """Label below the heading on the page."""
        label = self.metric.label.format(device=self.device)
        return label if len(self.metric.columns) == 1 else self._statistic

    @property
    def short(self) -> str:
        """Header in the terminal table."""
        return self.metric.table[self.percentile].format(device=self.device)

    @property
    def key(self) -> str:
        """Name of the value in ``summary.json``."""
        key = self.metric.key(self.device)
        return key if len(self.metric.columns) == 1 else f"{key}_{self._statistic}"

    @property
    def _statistic(self) -> str:
        return "avg" if self.percentile is None else f"p{self.percentile}"

    def is_sure(self, row: Row) -> bool:
        """False for a percentile (including a metric that is a median) with fewer samples than it needs."""
        return row.supports(MetricColumn(self.metric, self.percentile), self.part)

    def text(self, row: Row) -> str:
        value = self.metric.number(row.value(self.metric, self.part), self.percentile)
        if value is None:
            return MISSING
        return number(value) if self.is_sure(row) else UNSURE + number(value)

    def interval(self, row: Row) -> Interval | None:
        """Interval over trials of a metric that rates the server; None for a property of the load, such as a length."""
        if self.metric.better is None:
            return None
        return row.interval(self.metric, self.percentile, self.part)

    def margin(self, row: Row) -> str:
        """Half of the interval's width with the sign ±; "" without an interval."""
        found = self.interval(row)
        return "" if found is None else f"±{margin_text((found.high - found.low) / 2)}"


def number(value: float) -> str:
    """Three significant digits with thousands separators: 0.0123, 0.123, 1.23, 12.3, 123, 12,346. Only 0 is
    shown as 0.
    """
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def margin_text(value: float) -> str:
    """Two significant digits, which is sufficient for an uncertainty (JCGM 100:2008, 7.2.6)."""
    if value == 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.{max(0, digits)}f}"


def shown_metrics(view: RunView) -> list[Metric[Any]]:
    """The metrics that get columns.

    Image metrics are omitted if the load has no images and none were measured, others if no cell has a value of them.
    """

    parts: tuple[Part, ...] = ("whole", "steady")

    def is_omitted(metric: Metric[Any]) -> bool:
        is_special = metric.if_known or (metric.of_images and not view.has_images)
        return is_special and all(row.value(metric, part) is None for row in view.rows for part in parts)

    return [metric for metric in all_figures() if not is_omitted(metric)]


def page_columns(view: RunView, part: Part = "whole") -> tuple[tuple[str, tuple[Column, ...]], ...]:
    """The columns of the page by heading."""
    shown = [(metric, column) for metric in shown_metrics(view) for column in metric.columns]
    columns = {
        heading: tuple(Column(metric, q, view.device, part) for metric, q in shown if metric.heading is heading)
        for heading in Heading
    }
    return tuple((heading.value, found) for heading, found in columns.items() if found)


def table_columns(view: RunView) -> tuple[Column, ...]:
    """The columns of the terminal table."""
    return tuple(Column(metric, column, view.device) for metric in shown_metrics(view) for column in metric.table)


def markdown_columns(view: RunView) -> tuple[Column, ...]:
    return tuple(Column(metric, column, view.device) for metric in shown_metrics(view) for column in metric.markdown)


def interval_columns(view: RunView, part: Part) -> tuple[Column, ...]:
    """The columns whose intervals the summaries contain: those of the page that rate the server."""
    return tuple(column for _, columns in page_columns(view, part) for column in columns if column.metric.better)


def intervals_text(view: RunView) -> str:
    """An explanation of the intervals, or of why there are none."""
    if view.trials > 1:
        return (
            f"± is half of Student's interval of {100 * CONFIDENCE:g} % over the trials. A number has no interval if a "
            "trial lacks the number, or the requests that its percentile needs."
        )
    return "No intervals: a cell has one trial, and an interval over trials needs at least two (--trials)."


def needed(columns: Iterable[Column]) -> dict[int, int]:
    """The number of samples that each percentile among the columns needs."""
    return {q: samples_needed(q) for q in sorted({column.percentile for column in columns if column.percentile})}


def requests_text(row: Row, part: Part = "whole") -> str:
    """Number of successful requests, and of failed ones if there are any."""
    if row.figures is None:
        return {"missing": "not measured", "failed": "no result"}.get(row.status, MISSING)
    if (succeeded := row.value(request_count, part)) is None:
        return MISSING
    failed = row.value(error_request_count, part)
    return f"{succeeded:,}" + (f" + {failed:,} failed" if failed else "")

"""Renders the verdict of a run: each criterion's measured value, limit and reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from trtx.bench.documents import plain
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.bench.metrics import request_error_rate
from trtx.evals.gate import UNANSWERED
from trtx.report.tables import heads, markdown_table, table_cell, terminal_table
from trtx.runs.forms import ComparedWith, RunVerdict
from trtx.stats.intervals import Interval

MISSING = "–"
_STYLES = {Verdict.PASS: "green", Verdict.NO_VERDICT: "yellow"}


@dataclass(frozen=True, slots=True)
class JudgedLine:
    """One judgement, prepared for display."""

    judgement: CheckResult

    @property
    def measured(self) -> str:
        """A ratio to the baseline such as ``0.998 (0.985–1.011)``, or a metric with its unit."""
        if self.judgement.value is None:
            return MISSING
        if self.is_ratio:
            return ratio_text(self.judgement.interval) if self.judgement.interval else ratio(self.judgement.value)
        return f"{self.judgement.value:.4g} {self.judgement.unit}".strip()

    @property
    def is_ratio(self) -> bool:
        """Whether the value is candidate / baseline; the criterion of a bound contains an operator."""
        return self.judgement.criterion.count(":") < 3

    @property
    def limit(self) -> str:
        if self.judgement.limit is None:
            return MISSING
        return f"{self.judgement.limit:.10g} {self.judgement.unit}".strip()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The reason, followed by the doubts."""
        doubts = self.judgement.doubts
        return (self.judgement.reason, *([f"SUSPECT: {'; '.join(doubts)}"] if doubts else []))


def verdict_style(verdict: Verdict) -> str:
    """Rich style of a verdict."""
    return _STYLES.get(verdict, "bold red")


def _styled(verdict: Verdict) -> Text:
    return Text(verdict.value, verdict_style(verdict))


def ratio_text(interval: Interval) -> str:
    """Text such as ``0.998 (0.985–1.011)``."""
    return f"{ratio(interval.estimate)} ({ratio(interval.low)}–{ratio(interval.high)})"


def headline(verdict: RunVerdict) -> str:
    """Text such as ``3 of 12 checks did not pass``, with the part of each trial unless it is the whole."""
    count = len(verdict.judgements)
    bad = sum(one.verdict is not Verdict.PASS for one in verdict.judgements)
    all_passed = f"{count} check{'s' if count != 1 else ''}, all passed"
    part = "" if verdict.window == "whole" else ", over the steady part of each trial"
    return (f"{bad} of {count} checks did not pass" if bad else all_passed) + part


def compared_with(baseline: ComparedWith) -> str:
    return f"Baseline {baseline.name}, run {baseline.run}, {baseline.saved_at:%Y-%m-%d}."


def against_baseline(baseline: ComparedWith) -> tuple[str, ...]:
    """One sentence for each condition that differs or is unknown."""
    unchecked = (f"{one} is not known for both sides, so it was not compared" for one in baseline.unchecked)
    return (*baseline.differences, *unchecked, *baseline.records_unchecked)


def verdict_table(verdict: RunVerdict | None) -> RenderableType | None:
    """A terminal table for 80 columns.

    None if the only judgements are passed ones for failed requests and unanswered samples, which the tables of cells
    and scores already show.
    """
    shown = [] if verdict is None else [line for line in lines(verdict) if _is_told(line.judgement)]
    if verdict is None or not shown:
        return None
    rows = [
        (line.judgement.cell, line.judgement.criterion, line.measured, _styled(line.judgement.verdict))
        for line in shown
    ]
    table = terminal_table(heads("cell", "criterion", "measured", "verdict", text=("criterion", "verdict")), rows)
    if verdict.baseline is not None:
        ratios = "A metric is shown as its ratio to the baseline, with the ratio's interval."
        table.caption = f"{ratios} {compared_with(verdict.baseline)}"
    if verdict.window == "steady":
        table.caption = f"{table.caption or ''} Metrics cover the steady part of each trial.".strip()
    return Group(table, *_doubted(shown))


def verdict_markdown(verdict: RunVerdict | None) -> list[str]:
    """Lines of the section on the verdict; empty if nothing was judged."""
    if verdict is None:
        return []
    sentences = [f"**{verdict.verdict.value}**: {headline(verdict)}."]
    if verdict.baseline is not None:
        sentences.append(compared_with(verdict.baseline))
    columns = heads("cell", "criterion", "measured", "verdict", "why", text=("criterion", "verdict", "why"))
    rows = [
        (one.judgement.cell, one.judgement.criterion, one.measured, one.judgement.verdict.value, "; ".join(one.remarks))
        for one in lines(verdict)
    ]
    table = markdown_table(columns, rows)
    return ["", "## Verdict", "", " ".join(sentences), "", *table, *_differing(verdict.baseline)]


def verdict_json(verdict: RunVerdict | None) -> dict[str, Any] | None:
    """The verdict as in ``verdict.json``."""
    return None if verdict is None else plain(verdict)


def lines(verdict: RunVerdict) -> tuple[JudgedLine, ...]:
    return tuple(JudgedLine(one) for one in verdict.judgements)


def _is_told(judgement: CheckResult) -> bool:
    is_of_failures = judgement.criterion.startswith((f"{request_error_rate.name}:", f"{UNANSWERED}:"))
    return not is_of_failures or judgement.verdict is not Verdict.PASS


def _doubted(shown: Sequence[JudgedLine]) -> list[RenderableType]:
    """Each doubt once, since doubts concern a cell and not a judgement."""
    doubts = dict.fromkeys(
        f"{line.judgement.cell} SUSPECT: {doubt}" for line in shown for doubt in line.judgement.doubts
    )
    return [Text(), *map(Text, doubts)] if doubts else []


def _differing(baseline: ComparedWith | None) -> list[str]:
    found = () if baseline is None else against_baseline(baseline)
    return ["", "Against the baseline:", "", *(f"- {table_cell(one)}" for one in found)] if found else []


def ratio(value: float) -> str:
    """A ratio as text; very small or large ones as ``<0.001`` or ``>999``, since no measured ratio is 0."""
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 1000 else ">999"

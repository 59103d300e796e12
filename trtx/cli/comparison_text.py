"""A comparison for a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trtx.bench.judgement import Verdict
from trtx.experiment.comparison import ComparedMetric, Comparison
from trtx.report.columns import MISSING, number
from trtx.report.verdict import ratio_text

_STYLE = {Verdict.PASS: "green", Verdict.NO_VERDICT: "yellow"}


def comparison_table(comparison: Comparison) -> RenderableType:
    """Who, the metrics with their ratios, why some have none, and which conditions differ."""
    baseline, candidate = comparison.baseline.name, comparison.candidate.name
    is_judged = any(one.verdict is not None for one in comparison.metrics)
    table = Table(pad_edge=False, box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("metric", overflow="fold")
    for title in () if is_judged else ("baseline", "candidate"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    if is_judged:
        table.add_column("verdict", no_wrap=True)
    for one in comparison.metrics:
        values = () if is_judged else (_number(one.baseline), _number(one.candidate))
        verdict = () if one.verdict is None else (Text(one.verdict.value, _STYLE.get(one.verdict, "bold red")),)
        table.add_row(one.cell, one.metric, *values, ratio_text(one.ratio) if one.ratio else MISSING, *verdict)
    part = "" if comparison.window == "whole" else "\nover the steady part of each trial"
    who = Text(f"baseline:  {baseline}\ncandidate: {candidate}{part}", style="bold")
    return Group(who, Text(), table, *_reasons(comparison.metrics), *_differing(comparison))


def _reasons(metrics: tuple[ComparedMetric, ...]) -> list[RenderableType]:
    told = [
        f"{one.cell} {one.metric}: {one.reason}" for one in metrics if one.reason and one.verdict is not Verdict.PASS
    ]
    return [Text(), *map(Text, told)] if told else []


def _differing(comparison: Comparison) -> list[RenderableType]:
    told = [str(one) for one in comparison.differences]
    told += [f"{name} is not known of either" for name in comparison.unchecked]
    title = "They differ in:" if comparison.differences else "No condition is known to differ."
    return [Text(), Text(title), *(Padding(Text(one), (0, 0, 0, 2)) for one in told)]


def _number(value: float | None) -> str:
    return MISSING if value is None else number(value)

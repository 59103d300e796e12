"""The verdict of a run as it is shown: what was measured of each criterion, by what it was judged, and why."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trtx.bench.intervals import Interval
from trtx.bench.judgement import Judgement, Verdict
from trtx.bench.metrics import request_error_rate
from trtx.report.forms import ComparedWith, RunVerdict

MISSING = "–"
_STYLE = {Verdict.PASS: "green", Verdict.NO_VERDICT: "yellow"}
_BAD = "bold red"


@dataclass(frozen=True, slots=True)
class JudgedLine:
    """One judgement, ready to be shown."""

    judgement: Judgement

    @property
    def measured(self) -> str:
        """``0.998 (0.985–1.011)`` of the baseline, or a figure with its unit."""
        if self.judgement.value is None:
            return MISSING
        if self.is_ratio:
            return ratio_text(self.judgement.interval) if self.judgement.interval else f"{self.judgement.value:.3f}"
        return f"{self.judgement.value:.4g} {self.judgement.unit}".strip()

    @property
    def is_ratio(self) -> bool:
        """Of candidate / baseline; a bound has its operator in the criterion."""
        return self.judgement.criterion.count(":") < 3

    @property
    def limit(self) -> str:
        if self.judgement.limit is None:
            return MISSING
        return f"{self.judgement.limit:.10g} {self.judgement.unit}".strip()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The reason, and the doubts that it carries."""
        doubts = self.judgement.doubts
        return (self.judgement.reason, *([f"SUSPECT: {'; '.join(doubts)}"] if doubts else []))


def ratio_text(interval: Interval) -> str:
    """``0.998 (0.985–1.011)``; an end that has no meaning any more as ``>999``."""
    return f"{_ratio(interval.estimate)} ({_ratio(interval.low)}–{_ratio(interval.high)})"


def headline(verdict: RunVerdict) -> str:
    """``3 of 12 judgements did not pass``."""
    count = len(verdict.judgements)
    bad = sum(one.verdict is not Verdict.PASS for one in verdict.judgements)
    noun = "judgement" if count == 1 else "judgements"
    return f"{bad} of {count} {noun} did not pass" if bad else f"{count} {noun}, all passed"


def compared_with(baseline: ComparedWith) -> str:
    return f"Baseline {baseline.name}, run {baseline.run}, {baseline.saved_at:%Y-%m-%d}."


def verdict_table(verdict: RunVerdict | None) -> RenderableType | None:
    """For a terminal, at 80 columns. None where nothing was judged but requests that all succeeded: the cells' own
    table says that."""
    shown = [] if verdict is None else [line for line in lines(verdict) if _is_told(line.judgement)]
    if verdict is None or not shown:
        return None
    table = Table(pad_edge=False, box=None, padding=(0, 1, 0, 0), header_style="bold", caption_justify="left")
    table.add_column("cell", overflow="fold")
    table.add_column("criterion", overflow="fold")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for line in shown:
        style = _STYLE.get(line.judgement.verdict, _BAD)
        table.add_row(
            line.judgement.cell, line.judgement.criterion, line.measured, Text(line.judgement.verdict.value, style)
        )
    if verdict.baseline is not None:
        ratios = "Of a metric: its ratio to the baseline's, and the interval of that."
        table.caption = f"{ratios} {compared_with(verdict.baseline)}"
    return Group(table, *_doubted(shown))


def verdict_markdown(verdict: RunVerdict | None) -> list[str]:
    """Lines of a section, none where nothing was judged."""
    if verdict is None:
        return []
    told = [f"**{verdict.verdict.value}**: {headline(verdict)}."]
    if verdict.baseline is not None:
        told.append(compared_with(verdict.baseline))
    rows = [
        f"| {line.judgement.cell} | {line.judgement.criterion} | {line.measured} | {line.judgement.verdict.value} | "
        f"{_cell('; '.join(line.remarks))} |"
        for line in lines(verdict)
    ]
    table = ["| cell | criterion | measured | verdict | why |", "|---|---|--:|---|---|", *rows]
    return ["", "## Verdict", "", " ".join(told), "", *table, *_differing(verdict.baseline)]


def verdict_json(verdict: RunVerdict | None) -> dict[str, Any] | None:
    """As in ``verdict.json``."""
    return None if verdict is None else TypeAdapter(RunVerdict).dump_python(verdict, mode="json")


def verdict_cases(
    suite: ElementTree.Element, verdict: RunVerdict, seconds: dict[str, float], *, room: str = "bench"
) -> None:
    """A test case for each judgement, and their numbers in the suite: failed where it was found bad, an error where
    there is no verdict. ``seconds``: by cell, told once of each."""
    broken = [one for one in verdict.judgements if one.verdict is Verdict.NO_VERDICT]
    failing = [one for one in verdict.judgements if one.verdict not in (Verdict.NO_VERDICT, Verdict.PASS)]
    for name, found in (("tests", verdict.judgements), ("failures", failing), ("errors", broken)):
        suite.set(name, str(len(found)))
    left = dict(seconds)
    for one in verdict.judgements:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"trtx.{room}.{one.cell}", name=one.criterion,
            time=f"{left.pop(one.cell, 0.0):.3f}",
        )  # fmt: skip
        if one.verdict is not Verdict.PASS:
            kind = "error" if one in broken else "failure"
            ElementTree.SubElement(case, kind, type=one.verdict.value, message=xml_safe(one.reason))
        if one.doubts:
            ElementTree.SubElement(case, "system-out").text = xml_safe(f"SUSPECT: {'; '.join(one.doubts)}")


def lines(verdict: RunVerdict) -> tuple[JudgedLine, ...]:
    return tuple(JudgedLine(one) for one in verdict.judgements)


def xml_safe(text: str) -> str:
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _is_told(judgement: Judgement) -> bool:
    is_of_failures = judgement.criterion.startswith(f"{request_error_rate.name}:")
    return not is_of_failures or judgement.verdict is not Verdict.PASS


def _doubted(shown: Sequence[JudgedLine]) -> list[RenderableType]:
    """Each doubt once: it is of the cell, whatever is judged there."""
    told = dict.fromkeys(f"{line.judgement.cell} SUSPECT: {doubt}" for line in shown for doubt in line.judgement.doubts)
    return [Text(), *map(Text, told)] if told else []


def _differing(baseline: ComparedWith | None) -> list[str]:
    if baseline is None or not (baseline.differences or baseline.unchecked):
        return []
    told = [f"- {_cell(one)}" for one in baseline.differences]
    told += [f"- {one} is not known of either, so nobody checked that it is the same" for one in baseline.unchecked]
    return ["", "Against the baseline:", "", *told]


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 1000 else ">999"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

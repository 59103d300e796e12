"""Renders comparisons: of runs and baselines for a terminal, and of an A/B run's topologies in all formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.sample import parse_metric
from trtx.report.columns import MISSING, number
from trtx.report.tables import table_cell
from trtx.report.validity import MARKS
from trtx.report.verdict import ratio, ratio_text, verdict_style
from trtx.report.view import RunView
from trtx.report.whole_table import WholeTable
from trtx.runs.forms import (
    COMPARISON,
    ComparedArms,
    ComparedMetric,
    ComparedScore,
    Comparison,
    MeasuredStart,
    condition_text,
)
from trtx.stats.intervals import CONFIDENCE

_DIFFER, _NONE_DIFFERS = "They differ in:", "No condition is known to differ."
_NO_LIMIT = "Nothing was judged: no limit was given (--max-regression)."
_ENDED_EARLY = "Nothing was judged: the run ended early."


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One metric of one cell, prepared for display."""

    metric: ComparedMetric
    levels: tuple[tuple[str, ValidityLevel], ...] = ()  # letters and levels of sides whose cell is not VALID

    @property
    def label(self) -> str:
        """A short label such as ``c8 TTFT p50``, for use where the metric's name doesn't fit."""
        found = parse_metric(self.metric.metric, f"{COMPARISON.file}: metric {self.metric.metric}")
        statistic = f" {found.statistic}" if len(found.metric.columns) > 1 else ""
        device = self.metric.unit.rpartition("/")[2]  # the device is last in the unit of a per-device metric
        return f"{self.metric.cell} {found.metric.title.format(device=device)}{statistic}"

    @property
    def baseline(self) -> str:
        return _value(self.metric.baseline)

    @property
    def candidate(self) -> str:
        return _value(self.metric.candidate)

    @property
    def ratio(self) -> str:
        """Text such as ``0.998 (0.985–1.011)``."""
        return ratio_text(self.metric.ratio) if self.metric.ratio else MISSING

    @property
    def limit(self) -> str:
        return MISSING if self.metric.limit is None else f"{self.metric.limit:.4g}"

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(Round(number, *values) for number, values in enumerate(self.metric.rounds, 1))


@dataclass(frozen=True, slots=True)
class Round:
    """One metric in one block of an A/B run."""

    number: int
    baseline_value: float | None
    candidate_value: float | None

    @property
    def ratio(self) -> float | None:
        """candidate / baseline; None if either is unknown or 0."""
        if not self.baseline_value or not self.candidate_value:
            return None
        found = self.candidate_value / self.baseline_value
        return found if math.isfinite(found) else None

    @property
    def baseline(self) -> str:
        return _value(self.baseline_value)

    @property
    def candidate(self) -> str:
        return _value(self.candidate_value)

    @property
    def ratio_text(self) -> str:
        return MISSING if self.ratio is None else ratio(self.ratio)


@dataclass(frozen=True, slots=True)
class ArmsShown:
    """One topology (variant) of an A/B run compared with the baseline variant."""

    comparison: Comparison
    letters: tuple[str, str]  # letters of the two
    order: str
    lines: tuple[ComparedLine, ...]
    ended_early: bool

    @property
    def title(self) -> str:
        return f"A/B: {self.comparison.candidate} against {self.comparison.baseline}"

    @property
    def ratio_name(self) -> str:
        return " / ".join(reversed(self.letters))

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict; None: not judged."""
        verdicts = {metric.verdict for metric in self.comparison.metrics}
        verdicts |= {score.verdict for score in self.comparison.scores}
        return next((verdict for verdict in Verdict if verdict in verdicts), None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences about the two sides, the order of measurement, and the ratios."""
        (one, other), compared = self.letters, self.comparison
        return (
            f"{one} is {compared.baseline}, the baseline; {other} is {compared.candidate}.",
            f"Measured in the order {self.order}; each topology was restarted for every round.",
            f"{self.ratio_name}: rounds are pairs; all intervals hold at once with {100 * CONFIDENCE:g} %.",
            *_part(compared),
            *([] if self.verdict else [_ENDED_EARLY if self.ended_early else _NO_LIMIT]),
        )

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons why a cell is SUSPECT on either side, each once per cell."""
        found = [f"{one.cell} SUSPECT: {doubt}" for one in self.comparison.metrics for doubt in one.doubts]
        return tuple(dict.fromkeys(found))

    @property
    def differing(self) -> tuple[tuple[str, str, str], ...]:
        """Conditions that differ, with the value on each side."""
        return tuple((one.name, _has(one.before), _has(one.now)) for one in self.comparison.differences)

    @property
    def rounds(self) -> range:
        """Numbers of the A/B blocks, from 1."""
        return range(1, 1 + max((len(line.metric.rounds) for line in self.lines), default=0))


def arms_shown(view: RunView) -> tuple[ArmsShown, ...]:
    """The comparisons of an A/B run: one for each topology except the baseline; empty for other runs."""
    if view.arms is None:
        return ()
    compared = view.arms.comparisons
    labels = dict.fromkeys(one for each in compared for one in (each.baseline, each.candidate))
    letters = {label: chr(ord("A") + place) if place < 26 else label for place, label in enumerate(labels)}
    levels = {(row.topology, row.load.label): row.level for row in view.rows}

    def line(of: Comparison, metric: ComparedMetric) -> ComparedLine:
        found = ((letters[label], levels.get((label, metric.cell))) for label in (of.baseline, of.candidate))
        return ComparedLine(metric, tuple((letter, level) for letter, level in found if level and level in MARKS))

    return tuple(
        ArmsShown(
            one, (letters[one.baseline], letters[one.candidate]), _order(view.arms.starts, letters),
            tuple(line(one, metric) for metric in one.metrics), view.verdict is None,
        )
        for one in compared
    )  # fmt: skip


def comparison_json(arms: ComparedArms | None) -> dict[str, Any] | None:
    """The comparisons as in ``comparison.json``."""
    return None if arms is None else TypeAdapter(ComparedArms).dump_python(arms, mode="json")


def comparison_table(comparison: Comparison) -> RenderableType:
    """A terminal table of names, metrics and ratios, reasons for missing ratios, and differing conditions; 80
    columns.
    """
    lines = (f"baseline:  {comparison.baseline}", f"candidate: {comparison.candidate}", *_part(comparison))
    who = Text("\n".join(lines), style="bold")
    rows = [ComparedLine(one) for one in comparison.metrics]
    is_judged = any(one.verdict is not None for one in comparison.metrics)
    table = _with_verdicts(rows) if is_judged else _with_values(rows, ("baseline", "candidate", "ratio"))
    explained = [one for one in comparison.metrics if one.verdict is not Verdict.PASS]
    speed: list[RenderableType] = [Text(), table] if rows else []
    notes: list[RenderableType] = [Text(), *map(Text, comparison.notes)] if comparison.notes else []
    return Group(
        who,
        *speed,
        *_reasons([(f"{one.cell} {one.metric}", one.reason) for one in explained]),
        *_scores(comparison, ("baseline", "candidate", "difference")),
        *notes,
        *_differing(comparison, [*map(str, comparison.differences)]),
    )


def arms_tables(view: RunView) -> list[RenderableType]:
    """Terminal tables of an A/B run. Judgements are in the table of its verdict."""
    found: list[RenderableType] = []
    for one in arms_shown(view):
        table = _with_values(one.lines, (*one.letters, one.ratio_name))
        without = [(f"{m.cell} {m.metric}", m.reason) for m in one.comparison.metrics if m.ratio is None]
        head = Text("\n".join((one.title, *one.sentences)), style="bold")
        scores = _scores(one.comparison, (*one.letters, " − ".join(reversed(one.letters))))
        differing = _differing(one.comparison, _sides(one))
        found.append(Group(head, Text(), table, *_reasons(without), *scores, *differing))
    return found


def arms_markdown(view: RunView) -> list[str]:
    """One section for each topology compared with the baseline; empty unless it is an A/B run."""
    lines: list[str] = []
    for one in arms_shown(view):
        verdict = [f"**{one.verdict.value}**."] if one.verdict else []
        lines += ["", f"## {one.title}", "", " ".join([*verdict, *one.sentences]), ""]
        lines += [
            f"| load | metric | {' | '.join(one.letters)} | {one.ratio_name} | limit | verdict | "
            f"{one.ratio_name} by round | why |",
            "|---|---|--:|--:|--:|--:|---|---|---|",
        ]
        for line in one.lines:
            metric, by_round = line.metric, ", ".join(each.ratio_text for each in line.rounds) or MISSING
            marks = "".join(f" {letter} {level.value}" for letter, level in line.levels)
            judged = metric.verdict.value if metric.verdict else MISSING
            lines.append(
                f"| {metric.cell}{marks} | {metric.metric} | {line.baseline} | {line.candidate} | {line.ratio} | "
                f"{line.limit} | {judged} | {by_round} | {table_cell(line.metric.reason or '')} |"
            )
        lines += _scores_markdown(one)
        lines += ["", *(f"- {table_cell(doubt)}" for doubt in one.doubts)] if one.doubts else []
        lines += ["", _DIFFER if one.differing else _NONE_DIFFERS]
        conditions = [*_sides(one), *_unchecked(one.comparison)]
        lines += ["", *(f"- {table_cell(text)}" for text in conditions)] if conditions else []
    return lines


def _scores_markdown(shown: ArmsShown) -> list[str]:
    if not shown.comparison.scores:
        return []
    rows = [
        f"| {table_cell(one.task)} | {one.metric} | {score_text(one.baseline)} | {score_text(one.candidate)} | "
        f"{difference_text(one)} | {one.verdict.value if one.verdict else MISSING} | {table_cell(one.reason or '')} |"
        for one in shown.comparison.scores
    ]
    difference = " − ".join(reversed(shown.letters))
    return [
        "",
        f"| task | metric | {' | '.join(shown.letters)} | {difference} | verdict | why |",
        "|---|---|--:|--:|--:|---|---|",
        *rows,
    ]


def _with_values(rows: Sequence[ComparedLine], titles: tuple[str, str, str]) -> Table:
    table = _table()
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.metric.cell, row.metric.metric, row.baseline, row.candidate, row.ratio)
    return table


def _with_verdicts(rows: Sequence[ComparedLine]) -> Table:
    table = _table()
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        verdict = row.metric.verdict
        judged = Text(verdict.value, verdict_style(verdict)) if verdict else MISSING
        table.add_row(row.metric.cell, row.metric.metric, row.ratio, judged)
    return table


def _table() -> Table:
    table = WholeTable()
    table.add_column("cell", overflow="fold")
    table.add_column("metric", overflow="fold")
    return table


def _scores(comparison: Comparison, titles: tuple[str, str, str]) -> list[RenderableType]:
    """One row per task, with reasons for missing differences and for verdicts other than PASS; empty if a side has no
    scores.
    """
    if not comparison.scores:
        return []
    is_judged = any(one.verdict is not None for one in comparison.scores)
    table = WholeTable()
    for title in ("topology", "task", "metric"):
        table.add_column(title, overflow="fold")
    for title in (*titles[is_judged * 2 :], *(["verdict"] if is_judged else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for one in comparison.scores:
        scores = [] if is_judged else [score_text(one.baseline), score_text(one.candidate)]
        judged = [Text(one.verdict.value, verdict_style(one.verdict))] if one.verdict else []
        table.add_row(one.topology, one.task, one.metric, *scores, difference_text(one), *judged)
    unlike = [
        (f"{one.topology} {one.task}", one.reason) for one in comparison.scores if one.verdict is not Verdict.PASS
    ]
    return [Text(), table, *_reasons(unlike)]


def score_text(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


def difference_text(score: ComparedScore) -> str:
    """Text such as ``-0.02 (-0.05 to +0.01)``."""
    found = score.difference
    return MISSING if found is None else f"{found.estimate:+.3g} ({found.low:+.3g} to {found.high:+.3g})"


def _reasons(named: Sequence[tuple[str, str | None]]) -> list[RenderableType]:
    """Each reason once, with the cells and metrics, or tasks, that it applies to."""
    found: dict[str, list[str]] = {}
    for name, reason in named:
        if reason:
            found.setdefault(reason, []).append(name)
    lines = [Text(f"{', '.join(names)}: {reason}") for reason, names in found.items()]
    return [Text(), *lines] if lines else []


def _differing(comparison: Comparison, differences: Sequence[str]) -> list[RenderableType]:
    lines = [Padding(Text(one), (0, 0, 0, 2)) for one in (*differences, *_unchecked(comparison))]
    return [Text(), Text(_DIFFER if differences else _NONE_DIFFERS), *lines]


def _sides(shown: ArmsShown) -> list[str]:
    """Texts such as ``topology.workers.agg: A 1, B 2``."""
    one, other = shown.letters
    return [f"{name}: {one} {before}, {other} {now}" for name, before, now in shown.differing]


def _unchecked(comparison: Comparison) -> list[str]:
    unknown = (f"{name} is not known for both sides, so it was not compared" for name in comparison.unchecked)
    return [*unknown, *comparison.records_unchecked]


def _has(value: Any) -> str:
    """A condition of one topology as text. Conditions within a run are all known, so None means absent."""
    return MISSING if value is None else condition_text(value)


def _order(starts: Sequence[MeasuredStart], letters: dict[str, str]) -> str:
    """Text such as ``AB BA AB``: one word per block."""
    rounds = groupby(starts, key=lambda start: start.round)
    return " ".join("".join(letters.get(start.topology, "?") for start in round) for _, round in rounds) or MISSING


def _part(comparison: Comparison) -> list[str]:
    """The compared part of each trial, unless it is the whole."""
    return [] if comparison.window == "whole" else ["over the steady part of each trial"]


def _value(value: float | None) -> str:
    return MISSING if value is None else number(value)

"""Renders the validity of cells with the same words and order in all formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtx.bench.documents import plain
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.validity import Reason
from trtx.report.view import Row, RunView

MARKS = {
    ValidityLevel.SUSPECT: "?",
    ValidityLevel.INVALID: "!",
}  # shown next to a load where the word does not fit
_RECORDS = "The records under cells/, from which metrics and validity are computed,"
_MEANINGS = {
    ValidityLevel.VALID: "no check found a reason for doubt",
    ValidityLevel.SUSPECT: "something disturbed the measurement, or there is too little data for a conclusion",
    ValidityLevel.INVALID: "a load or system other than the requested one was measured, or its records have changed",
}


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A group of checks that were not made, in the same cells and for the same reason in each cell."""

    names: tuple[str, ...]
    cells: str  # their names, or "all cells"
    whys: tuple[tuple[str, str], ...]  # pairs of cells and reason

    def __str__(self) -> str:
        (first_cells, first), *others = self.whys
        if not others:
            return f"{', '.join(self.names)} ({first}): {self.cells}"
        return f"{', '.join(self.names)} ({first_cells}: {first}; {len(others)} more in summary.json): {self.cells}"


@dataclass(frozen=True, slots=True)
class AtLevel:
    """The cells of one level, with the level's meaning."""

    level: ValidityLevel
    cells: tuple[str, ...]

    @property
    def meaning(self) -> str:
        return _MEANINGS[self.level]


def level_text(row: Row) -> str | None:
    """VALID, SUSPECT or INVALID; None if there is nothing to judge."""
    return None if row.level is None else row.level.value


def reasons(row: Row) -> tuple[Reason, ...]:
    """Reasons against a cell, worst first. Each has its own level, so an INVALID cell may have SUSPECT reasons too."""
    return () if row.validity is None else row.validity.reasons


def reason_text(reason: Reason) -> str:
    return f"{reason.name}: {reason.sentence}"


def reasons_text(row: Row) -> str:
    """All reasons against a cell in one line."""
    return "; ".join(map(reason_text, reasons(row)))


def not_checked_in(row: Row) -> tuple[str, ...]:
    """Names of the checks that were not made for a cell."""
    return () if row.validity is None else tuple(one.name for one in row.validity.unchecked)


def by_level(view: RunView) -> tuple[AtLevel, ...]:
    """The levels that occur, worst first, with their cells."""
    return tuple(
        AtLevel(level, cells)
        for level in (ValidityLevel.INVALID, ValidityLevel.SUSPECT, ValidityLevel.VALID)
        if (cells := tuple(row.name for row in view.rows if row.level is level))
    )


def doubtful(view: RunView) -> tuple[Row, ...]:
    """The cells that aren't VALID, INVALID ones first."""
    found = [row for row in view.rows if row.level in MARKS]
    return tuple(sorted(found, key=lambda row: row.level is not ValidityLevel.INVALID))


def not_checked(view: RunView) -> tuple[NotChecked, ...]:
    """Checks that were not made, most frequent first. Checks with the same cells and reasons share an entry."""
    judged = [row for row in view.rows if row.validity is not None]
    found: dict[str, dict[str, list[str]]] = {}  # cells by check and reason
    for row in judged:
        for one in row.validity.unchecked if row.validity else ():
            found.setdefault(one.name, {}).setdefault(one.why, []).append(row.name)
    names: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, whys in found.items():
        names.setdefault(tuple((_named(cells, judged), why) for why, cells in whys.items()), []).append(name)
    counts = dict(not_checked_counts(view))
    lines = [
        NotChecked(
            tuple(checks), _named([row.name for row in judged if checks[0] in not_checked_in(row)], judged), whys
        )
        for whys, checks in names.items()
    ]
    return tuple(sorted(lines, key=lambda line: -counts[line.names[0]]))


def _named(cells: Sequence[str], judged: Sequence[Row]) -> str:
    return "all cells" if len(cells) == len(judged) else ", ".join(cells)


def not_checked_counts(view: RunView) -> tuple[tuple[str, int], ...]:
    """Number of cells per check that was not made, highest first."""
    counts: dict[str, int] = {}
    for row in view.rows:
        for name in not_checked_in(row):
            counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts.items(), key=lambda entry: -entry[1]))


def records_text(view: RunView) -> str:
    """Sentences on whether the files that metrics and validity come from are unchanged.

    Without measured cells, only missing files are mentioned.
    """
    measured = [row for row in view.rows if row.figures is not None]
    if not measured:
        return f"The files of the run: {view.documents.state}." if view.documents.gone else ""
    others = [row.name for row in measured if not row.kept.is_intact]
    rest = f" The other files of the run: {view.documents.state}."
    if not others:
        return f"{_RECORDS} are unchanged since each trial ended, according to the SHA-256 in journal.jsonl.{rest}"
    if view.changed_rows:
        changed = _named([row.name for row in view.changed_rows], measured)
        return f"{_RECORDS} have changed since the trials ended: {changed}.{rest}"
    return f"{_RECORDS} could not be checked for changes: {_named(others, measured)}.{rest}"


def validity_json(view: RunView) -> dict[str, Any]:
    """Validity by cell, as in ``cell.json``, for cells with metrics."""
    return {row.name: plain(row.validity) for row in view.rows if row.validity}

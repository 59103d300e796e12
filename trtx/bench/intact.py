"""Whether what a cell follows from is still what its trials left: by the digests in the journal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.bench.cells import Cell, cell_directory, read_cells
from trtx.bench.checks import Level
from trtx.bench.digests import Changes, FileDigest, changes_since
from trtx.bench.journal import Event, TrialEnded, TrialStarted, read_journal
from trtx.bench.validity import Reason, Unchecked, Validity
from trtx.errors import UsageError

NAME = "records"  # beside those of the checks
_TOLD = 3  # files in one sentence

Digests = Mapping[tuple[str, int], Mapping[str, FileDigest]]  # by cell and number of the trial


def digests_in(journal: Iterable[Event]) -> Digests:
    """Of each trial as it ended the last time. One that was begun again, and whose end nobody noted, has none."""
    found: dict[tuple[str, int], Mapping[str, FileDigest]] = {}
    for event in journal:
        if isinstance(event, TrialStarted | TrialEnded):
            found.pop((event.cell, event.trial), None)
        if isinstance(event, TrialEnded) and event.files is not None:
            found[event.cell, event.trial] = event.files
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the files of one cell."""

    changed: tuple[str, ...] = ()  # a sentence each
    gone: tuple[str, ...] = ()
    unknown: bool = False  # of a trial nobody noted what its files were

    @property
    def is_intact(self) -> bool:
        return not self.changed and self.unchecked is None

    @property
    def unchecked(self) -> str | None:
        """Why nobody can tell of a file what it was; None: all can be told."""
        if self.gone:
            return f"{_some(self.gone)} gone"
        return "what they were as their trial ended was not noted" if self.unknown else None


def kept_of(run_dir: Path, cell: Cell, digests: Digests) -> Kept:
    """Reads the files of its trials that gave figures."""
    found: list[Changes] = []
    unknown = False
    for trial in cell.trials:
        then = digests.get((cell.name, trial.number))
        unknown |= trial.figures is not None and then is None
        if trial.figures is not None and then is not None:
            found.append(changes_since(cell_directory(run_dir, cell.name) / trial.directory, then))
    return Kept(
        tuple(one for changes in found for one in changes.changed),
        tuple(one for changes in found for one in changes.gone),
        unknown,
    )


def read_kept(run_dir: Path) -> dict[str, tuple[Cell, Kept]]:
    """Every cell of a run, by its name, with what became of its files."""
    digests = digests_in(read_journal(run_dir))
    return {cell.name: (cell, kept_of(run_dir, cell, digests)) for cell in read_cells(run_dir)}


def as_kept(cell: Cell, kept: Kept) -> Cell:
    """The cell, with what its records say of its validity by now."""
    return cell if cell.validity is None else replace(cell, validity=beside_records(cell.validity, kept))


def refuse_changed(run_dir: Path, kept: Mapping[str, Kept]) -> None:
    """Raises UsageError where figures are of other records than lie there, naming the first file. ``kept``: by cell."""
    changed = {name: one.changed for name, one in kept.items() if one.changed}
    if changed:
        first, files = next(iter(changed.items()))
        raise UsageError(
            f"records of {', '.join(changed)} were changed since they were measured, so their figures are of others "
            f"than lie there ({first}/{files[0]}); put the files back from a copy, or measure those trials again: "
            f"trtx bench --resume {shlex.quote(str(run_dir))}"
        )


def why_unchecked(kept: Mapping[str, Kept]) -> str | None:
    """Of which cells, by name, nobody can tell whether their records are what they were, and why; None: of none."""
    cells: dict[str, list[str]] = {}
    for name, one in kept.items():
        if (why := one.unchecked) is not None:
            cells.setdefault(why, []).append(name)
    return "; ".join(f"{_some(tuple(names))}: {why}" for why, names in cells.items()) or None


def beside_records(validity: Validity, kept: Kept) -> Validity:
    """A cell whose figures are of other records than lie there is INVALID, whatever it was as it was measured."""
    if kept.changed:
        reason = Reason(NAME, Level.INVALID, f"{_some(kept.changed)}; its figures are of what was there before")
        return replace(validity, level=Level.INVALID, reasons=(reason, *validity.reasons))
    if kept.unchecked is None:
        return validity
    return replace(validity, unchecked=(*validity.unchecked, Unchecked(NAME, kept.unchecked)))


def _some(told: tuple[str, ...]) -> str:
    more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return ", ".join(told[:_TOLD]) + more

"""Whether what a cell follows from is still what its trials left: by the digests in the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.bench.cells import Cell, cell_directory
from trtx.bench.checks import Level
from trtx.bench.digests import Changes, FileDigest, changes_since
from trtx.bench.journal import Event, TrialEnded, TrialStarted
from trtx.bench.validity import Reason, Unchecked, Validity

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
        return not (self.changed or self.gone or self.unknown)


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


def beside_records(validity: Validity, kept: Kept) -> Validity:
    """A cell whose figures are of other records than lie there is INVALID, whatever it was as it was measured."""
    if kept.changed:
        reason = Reason(NAME, Level.INVALID, f"{_some(kept.changed)}; its figures are of what was there before")
        return replace(validity, level=Level.INVALID, reasons=(reason, *validity.reasons))
    why = f"{_some(kept.gone)} gone" if kept.gone else "what they were as their trial ended was not noted"
    return validity if kept.is_intact else replace(validity, unchecked=(*validity.unchecked, Unchecked(NAME, why)))


def _some(told: tuple[str, ...]) -> str:
    more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return ", ".join(told[:_TOLD]) + more

"""Checks whether a run's files are unchanged, by the digests in its journal. Without a digest, the answer is
unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.bench.cells import CELL, Cell, cell_directory, read_cells
from trtx.bench.digests import Changes, FileDigest, changes_in, changes_since, digests_of, documents_of
from trtx.bench.journal import (
    CellWritten,
    JournalEvent,
    RunEnded,
    RunFailed,
    RunResumed,
    TrialEnded,
    TrialStarted,
    read_journal,
)
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.validity import Reason, Unchecked, Validity
from trtx.errors import UsageError

NAME = "records"  # listed with the names of the checks
_MOST_FILES = 3  # maximum number of files in one sentence

Digests = Mapping[tuple[str, int], Mapping[str, FileDigest]]  # by cell and trial number


def digests_in(journal: Iterable[JournalEvent]) -> Digests:
    """The file digests of each trial from its last end. A trial that was restarted without a recorded end has none."""
    found: dict[tuple[str, int], Mapping[str, FileDigest]] = {}
    for event in journal:
        if isinstance(event, TrialStarted | TrialEnded):
            found.pop((event.cell, event.trial), None)
        if isinstance(event, TrialEnded) and event.files is not None:
            found[event.cell, event.trial] = event.files
    return found


def cell_digests_in(journal: Sequence[JournalEvent]) -> dict[str, tuple[FileDigest, ...]]:
    """The digests that each cell's file may have, by cell name: normally the one of the last write.

    If the journal ends with the write, the run may have been killed before the file was replaced, so the previous
    digest is valid as well.
    """
    found: dict[str, tuple[FileDigest, ...]] = {}
    for event in journal:
        if isinstance(event, CellWritten):
            before = found.get(event.cell, ())[-1:] if event is journal[-1] else ()
            found[event.cell] = (*before, event.file)
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """State of the files of one cell, compared with their digests."""

    changed: tuple[str, ...] = ()  # one sentence for each changed file from which the cell is computed
    gone: tuple[str, ...] = ()
    unknown: bool = False  # a trial has no recorded digests
    rewritten: str | None = None  # a sentence: the cell's file differs from what was written
    unknown_cell: bool = False  # the cell's file has no recorded digest

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each changed file."""
        return self.changed if self.rewritten is None else (*self.changed, self.rewritten)

    @property
    def is_intact(self) -> bool:
        return not self.problems and self.unchecked is None

    @property
    def unchecked(self) -> str | None:
        """The reason why a file could not be checked; None if every file was."""
        if self.gone:
            return f"{_some(self.gone)} gone"
        if self.unknown:
            return "the journal has no SHA-256 of them from the end of their trial"
        return f"the journal has no SHA-256 of {CELL.file}" if self.unknown_cell else None


def kept_of(run_dir: Path, cell: Cell, digests: Digests, written: Mapping[str, tuple[FileDigest, ...]]) -> Kept:
    """Checks the cell's file and the files of its trials with metrics. ``written``: from :func:`cell_digests_in`."""
    found: list[Changes] = []
    unknown = False
    for trial in cell.trials:
        then = digests.get((cell.name, trial.number))
        unknown |= trial.figures is not None and then is None
        if trial.figures is not None and then is not None:
            found.append(changes_since(cell_directory(run_dir, cell.name) / trial.directory, then))
    directory = cell_directory(run_dir, cell.name)
    own = written.get(cell.name, ())
    since = [changes_in(directory, {CELL.file: one}, "it was written").changed for one in own]
    return Kept(
        tuple(one for changes in found for one in changes.changed),
        tuple(one for changes in found for one in changes.gone),
        unknown,
        rewritten=since[-1][0] if since and all(since) else None,
        unknown_cell=not own,
    )


def read_kept(run_dir: Path) -> dict[str, tuple[Cell, Kept]]:
    """Every cell of a run, by name, with the state of its files."""
    journal = read_journal(run_dir)
    digests, written = digests_in(journal), cell_digests_in(journal)
    return {cell.name: (cell, kept_of(run_dir, cell, digests, written)) for cell in read_cells(run_dir)}


def run_ended(run_dir: Path) -> RunEnded:
    """The event for the end of a run, with the digests of all files that no other event covers."""
    return RunEnded(files=digests_of(run_dir, documents_of(run_dir)))


def run_failed(run_dir: Path, error: BaseException) -> RunFailed:
    """The event for a run that failed, with the same digests as :func:`run_ended`."""
    return RunFailed(error=str(error) or type(error).__name__, files=digests_of(run_dir, documents_of(run_dir)))


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """State of a run's files outside its cells, compared with the end of the run."""

    changed: tuple[str, ...] = ()  # one sentence each
    gone: tuple[str, ...] = ()
    unknown: bool = False  # no digests recorded: the run is older, or was killed

    @property
    def unchecked(self) -> str | None:
        if self.gone:
            return f"{_some(self.gone)} gone"
        return "the journal has no SHA-256 of them from the end of the run" if self.unknown else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings to show at the top of a report."""
        return (f"Changed since the run ended: {_some(self.changed)}.",) if self.changed else ()

    @property
    def state(self) -> str:
        if self.changed:
            return f"changed since the run ended: {_some(self.changed)}"
        if self.unchecked is not None:
            return f"not checked: {self.unchecked}"
        return "unchanged since the run ended, according to the SHA-256 in journal.jsonl"


def read_kept_documents(run_dir: Path) -> KeptDocuments:
    """Checks every file whose digest the end of the run recorded."""
    then: Mapping[str, FileDigest] | None = None
    journal = read_journal(run_dir)
    for event in journal:
        if isinstance(event, RunResumed):
            then = None
        elif isinstance(event, RunEnded | RunFailed):
            then = event.files
    if then is None:
        return KeptDocuments(unknown=True)
    changes = changes_in(run_dir, then, "the run ended")
    added = tuple(f"{name} was added after the run ended" for name in documents_of(run_dir) if name not in then)
    cells = [cell_directory(run_dir, name) / CELL.file for name in cell_digests_in(journal)]
    lost = tuple(cell.relative_to(run_dir).as_posix() for cell in cells if not cell.is_file())
    return KeptDocuments((*changes.changed, *added), (*changes.gone, *lost))


def refuse_changed_documents(run_dir: Path, *, under: tuple[str, ...] = ("",)) -> KeptDocuments:
    """Raises UsageError if a file of the run has changed since its end. Only files with a prefix in ``under`` count."""
    kept = read_kept_documents(run_dir)
    if changed := [one for one in kept.changed if one.startswith(under)]:
        raise UsageError(
            f"files in {run_dir} have changed since the run ended ({_some(tuple(changed))}), so they may not be what "
            "was measured; restore them from a copy, or start a new run"
        )
    return kept


def as_kept(cell: Cell, kept: Kept) -> Cell:
    """The cell, with its validity updated for the state of its records."""
    return cell if cell.validity is None else replace(cell, validity=with_records(cell.validity, kept))


def refuse_changed(run_dir: Path, kept: Mapping[str, Kept]) -> None:
    """Raises UsageError, naming the first file, if metrics no longer match the records on disk. ``kept`` is by cell
    name.
    """
    changed = {name: one.problems for name, one in kept.items() if one.problems}
    if changed:
        first, files = next(iter(changed.items()))
        what = "records" if any(one.changed for one in kept.values()) else "metrics"
        raise UsageError(
            f"{what} of {', '.join(changed)} have changed since the measurement, so metrics and records no longer "
            f"match ({first}/{files[0]}); restore the files from a copy, or measure the lost trials again with trtx "
            f"bench --resume {shlex.quote(str(run_dir))}"
        )


def why_unchecked(kept: Mapping[str, Kept]) -> str | None:
    """A clause that names the cells whose records can't be checked, with the reasons; None if all can."""
    cells: dict[str, list[str]] = {}
    for name, one in kept.items():
        if (why := one.unchecked) is not None:
            cells.setdefault(why, []).append(name)
    return "; ".join(f"{_some(tuple(names))}: {why}" for why, names in cells.items()) or None


def with_records(validity: Validity, kept: Kept) -> Validity:
    """The validity, updated: a cell whose metrics don't match its records is INVALID, whatever its earlier level."""
    if kept.problems:
        reason = Reason(NAME, ValidityLevel.INVALID, f"{_some(kept.problems)}; its metrics no longer match its records")
        return replace(validity, level=ValidityLevel.INVALID, reasons=(reason, *validity.reasons))
    if kept.unchecked is None:
        return validity
    return replace(validity, unchecked=(*validity.unchecked, Unchecked(NAME, kept.unchecked)))


def _some(sentences: tuple[str, ...]) -> str:
    more = f" and {len(sentences) - _MOST_FILES} more" if len(sentences) > _MOST_FILES else ""
    return ", ".join(sentences[:_MOST_FILES]) + more

"""Whether the files of a run are what it wrote, by the digests in its journal. Without a digest it is not known."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.bench.cells import CELL, Cell, cell_directory, read_cells
from trtx.bench.digests import Changes, FileDigest, changes_in, changes_since, digests_of, documents_of
from trtx.bench.journal import (
    CellWritten,
    Event,
    RunEnded,
    RunFailed,
    RunResumed,
    TrialEnded,
    TrialStarted,
    read_journal,
)
from trtx.bench.judge.checks import Level
from trtx.bench.judge.validity import Reason, Unchecked, Validity
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


def cell_digests_in(journal: Sequence[Event]) -> dict[str, tuple[FileDigest, ...]]:
    """Of each cell's file, by the cell's name: as it was written last. Where the journal ends there, as that of a run
    that was killed as it wrote, the file may be the one before still."""
    found: dict[str, tuple[FileDigest, ...]] = {}
    for event in journal:
        if isinstance(event, CellWritten):
            before = found.get(event.cell, ())[-1:] if event is journal[-1] else ()
            found[event.cell] = (*before, event.file)
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the files of one cell."""

    changed: tuple[str, ...] = ()  # a sentence each: files that the cell follows from
    gone: tuple[str, ...] = ()
    unknown: bool = False  # what the files of a trial were was not noted
    rewritten: str | None = None  # that the cell's own file holds other figures than were written, a sentence
    unknown_cell: bool = False  # what the cell's own file was was not noted

    @property
    def told(self) -> tuple[str, ...]:
        """A sentence for each file that is another by now."""
        return self.changed if self.rewritten is None else (*self.changed, self.rewritten)

    @property
    def is_intact(self) -> bool:
        return not self.told and self.unchecked is None

    @property
    def unchecked(self) -> str | None:
        """Why it is not known of a file what it was; None: it is known of all."""
        if self.gone:
            return f"{_some(self.gone)} gone"
        if self.unknown:
            return "what they were as their trial ended was not noted"
        return f"what {CELL.file} was as it was written was not noted" if self.unknown_cell else None


def kept_of(run_dir: Path, cell: Cell, digests: Digests, written: Mapping[str, tuple[FileDigest, ...]]) -> Kept:
    """Reads the files of its trials that gave figures, and its own. ``written``: of :func:`cell_digests_in`."""
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
    """Every cell of a run, by its name, with what became of its files."""
    journal = read_journal(run_dir)
    digests, written = digests_in(journal), cell_digests_in(journal)
    return {cell.name: (cell, kept_of(run_dir, cell, digests, written)) for cell in read_cells(run_dir)}


def run_ended(run_dir: Path) -> RunEnded:
    """With the digests of all files that no other event has."""
    return RunEnded(files=digests_of(run_dir, documents_of(run_dir)))


def run_failed(run_dir: Path, error: BaseException) -> RunFailed:
    """The same of a run that ended early."""
    return RunFailed(error=str(error) or type(error).__name__, files=digests_of(run_dir, documents_of(run_dir)))


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """What became of the files of a run beside those of its cells since it ended."""

    changed: tuple[str, ...] = ()  # a sentence each
    gone: tuple[str, ...] = ()
    unknown: bool = False  # the run noted none: it is an older one, or was killed

    @property
    def unchecked(self) -> str | None:
        if self.gone:
            return f"{_some(self.gone)} gone"
        return "what they were as the run ended was not noted" if self.unknown else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before all else."""
        return (f"Changed since the run ended: {_some(self.changed)}.",) if self.changed else ()

    @property
    def told(self) -> str:
        if self.changed:
            return f"changed since the run ended: {_some(self.changed)}"
        if self.unchecked is not None:
            return f"not covered: {self.unchecked}"
        return "unchanged since the run ended, by the SHA-256 in journal.jsonl"


def read_kept_documents(run_dir: Path) -> KeptDocuments:
    """Reads every file that the end of the run noted."""
    then: Mapping[str, FileDigest] | None = None
    for event in read_journal(run_dir):
        if isinstance(event, RunResumed):
            then = None
        elif isinstance(event, RunEnded | RunFailed):
            then = event.files
    if then is None:
        return KeptDocuments(unknown=True)
    changes = changes_in(run_dir, then, "the run ended")
    added = tuple(f"{name} was not there as the run ended" for name in documents_of(run_dir) if name not in then)
    return KeptDocuments((*changes.changed, *added), changes.gone)


def refuse_changed_documents(run_dir: Path, *, under: tuple[str, ...] = ("",)) -> KeptDocuments:
    """Raises UsageError where a file of the run is another than as it ended. ``under``: of those below these alone."""
    kept = read_kept_documents(run_dir)
    if changed := [one for one in kept.changed if one.startswith(under)]:
        raise UsageError(
            f"{run_dir} was changed since its run ended ({_some(tuple(changed))}), so what it says is not what was "
            "measured; put the file back from a copy, or start a new run"
        )
    return kept


def as_kept(cell: Cell, kept: Kept) -> Cell:
    """The cell, with what its records say of its validity by now."""
    return cell if cell.validity is None else replace(cell, validity=beside_records(cell.validity, kept))


def refuse_changed(run_dir: Path, kept: Mapping[str, Kept]) -> None:
    """Raises UsageError where figures are of other records than lie there, naming the first file. ``kept``: by cell."""
    changed = {name: one.told for name, one in kept.items() if one.told}
    if changed:
        first, files = next(iter(changed.items()))
        what = "records" if any(one.changed for one in kept.values()) else "figures"
        raise UsageError(
            f"{what} of {', '.join(changed)} were changed since they were measured, so their figures are not those of "
            f"their records ({first}/{files[0]}); put the files back from a copy, or go on with the run, which "
            f"measures again what is lost: trtx bench --resume {shlex.quote(str(run_dir))}"
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
    if kept.told:
        reason = Reason(NAME, Level.INVALID, f"{_some(kept.told)}; its figures are not those of its records")
        return replace(validity, level=Level.INVALID, reasons=(reason, *validity.reasons))
    if kept.unchecked is None:
        return validity
    return replace(validity, unchecked=(*validity.unchecked, Unchecked(NAME, kept.unchecked)))


def _some(told: tuple[str, ...]) -> str:
    more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return ", ".join(told[:_TOLD]) + more

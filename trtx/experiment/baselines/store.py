"""A directory of baselines, one small file each, which are saved as candidates, promoted, superseded and expired.

The directory suits git or a CI cache: its content doesn't depend on its location.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path

from trtx.bench import Load
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import Verdict
from trtx.config.files import path_problem
from trtx.config.wording import quoted
from trtx.errors import UsageError
from trtx.experiment.baselines.baseline import Baseline, of_run, of_scored_run, read_baseline, write_baseline
from trtx.experiment.baselines.conditions import COMPARED_BY, Conditions, differences, load_differences
from trtx.experiment.gate_spec import check_baseline_name
from trtx.report.evaluation import is_evaluation
from trtx.runs.forms import LOCK, Difference


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines in a directory, which need not exist yet."""

    directory: Path

    def path(self, name: str) -> Path:
        """Path of a baseline's file. Raises UsageError for an invalid name."""
        check_baseline_name(name)
        return self.directory / f"{name}.json"

    def all(self) -> tuple[Baseline, ...]:
        """All baselines, latest first. Raises UsageError for an unreadable file."""
        found = []
        for path in self.directory.glob("*.json"):
            try:
                found.append(_named(path))
            except UsageError as error:
                raise UsageError(f"{error}; or remove {path}, which keeps the others from being read") from error
        return tuple(sorted(found, key=lambda one: (one.saved_at, one.name), reverse=True))

    def get(self, name: str) -> Baseline:
        """The baseline with this name. Raises UsageError, with the nearest names, if there is none."""
        path = self.path(name)
        if path.is_file():
            return _named(path)
        known = sorted(path.stem for path in self.directory.glob("*.json"))
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            remedy = f"did you mean {' or '.join(near)}"
        elif known:
            remedy = f"expected one of {', '.join(known[:8])}"
        else:
            remedy = "the directory has none, so save one with trtx bench --save-baseline NAME"
        raise UsageError(f"no baseline is called {quoted(name)} in {str(self.directory)!r}; {remedy}")

    def check_can_save(self, name: str) -> None:
        """Raises UsageError if ``name`` belongs to a promoted baseline."""
        path = self.path(name)
        if path.exists() and read_baseline(path).promoted_at is not None:
            raise UsageError(f"{path} is promoted and would be replaced; save under another name, and promote that one")

    def check_can_write(self) -> None:
        """Raises UsageError if baselines can't be written here. Writes nothing."""
        there = next(one for one in (self.directory, *self.directory.absolute().parents) if os.access(one, os.F_OK))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "is not a directory" if not there.is_dir() else "can't be written to"
            raise UsageError(
                f"no baseline can be saved in {str(self.directory)!r}, as {str(there)!r} {why}; name another with "
                "--baseline-dir"
            )

    def save(self, run_dir: Path, name: str) -> Path:
        """Saves a run as a candidate. Raises UsageError if one of its cells has no result."""
        self.check_can_save(name)
        measured = of_run(run_dir)
        if without := [cell.name for cell in measured.cells if cell.figures is None]:
            raise UsageError(f"{run_dir} has no result for {', '.join(without)}; measure these cells again")
        path = self.path(name)
        write_baseline(path, replace(measured, name=name, saved_at=datetime.now(UTC).replace(microsecond=0)))
        return path

    def promote(self, name: str) -> tuple[Baseline, tuple[str, ...]]:
        """Promotes a baseline for its machine, model and load. Returns it, and the names of those that it supersedes.

        Raises UsageError unless the verdict of its run is PASS and none of its cells is INVALID. The verdict alone
        isn't sufficient: a run without a gate passes if no request failed, and an INVALID cell can't be compared.
        """
        candidate = self.get(name)
        if candidate.verdict is not Verdict.PASS:
            was = "was not judged" if candidate.verdict is None else f"ended with {quoted(candidate.verdict.value)}"
            raise UsageError(f"{name} can't be promoted: its run {candidate.run} {was}; expected a run that passed")
        if invalid := [one.cell for one in candidate.samples("whole") if one.validity is ValidityLevel.INVALID]:
            raise UsageError(
                f"{name} can't be promoted, because cells of its run {candidate.run} are INVALID "
                f"({', '.join(invalid)}); measure again"
            )
        now = datetime.now(UTC).replace(microsecond=0)
        promoted = replace(candidate, promoted_at=now, superseded_by=None)
        replaced = [
            one
            for one in self.all()
            if one.is_current and one.name != name and one.loads == candidate.loads and not _others(one, candidate)
        ]
        write_baseline(self.path(name), promoted)
        for one in replaced:  # written last, so that there is a current baseline at any time
            write_baseline(self.path(one.name), replace(one, superseded_by=name))
        return promoted, tuple(one.name for one in replaced)

    def expired(self, older_than_days: int | None) -> tuple[Baseline, ...]:
        """Superseded baselines and, if an age is given, all older baselines, promoted or not."""
        oldest = None if older_than_days is None else datetime.now(UTC) - timedelta(days=older_than_days)
        return tuple(
            one for one in self.all() if one.superseded_by is not None or (oldest is not None and one.saved_at < oldest)
        )

    def remove(self, found: Sequence[Baseline]) -> None:
        """Deletes the files of baselines. Raises UsageError if one can't be deleted."""
        for one in found:
            path = self.path(one.name)
            try:
                path.unlink()
            except OSError as error:
                raise UsageError(f"{path} can't be removed ({error.strerror}); remove it by hand") from error

    def pick(self, conditions: Conditions, loads: Mapping[str, Load], allowed: Sequence[str]) -> Baseline:
        """The latest promoted baseline for this machine, model and load that has all cells. Raises UsageError if none
        fits.
        """
        promoted = [one for one in self.all() if one.is_current]
        if not promoted:
            raise UsageError(
                f"{str(self.directory)!r} has no promoted baseline to choose from; promote a candidate with "
                "trtx baseline promote NAME, or name one"
            )
        why = []
        for one in promoted:
            other = [*differences(one.conditions, conditions), *load_differences(one.cells, loads)]
            other = [found for found in other if _counts(found, allowed)]
            lacking = [name for name in loads if name not in one.loads]
            if not other and not lacking:
                return one
            why.append(f"{one.name}: {other[0] if other else f'it has no cell {lacking[0]}'}")
        raise UsageError(
            f"no promoted baseline in {str(self.directory)!r} matches this machine, model and load "
            f"({'; '.join(why[:3])}); save a baseline of a run on this machine, and promote it"
        )


def open_baseline(
    text: str, baselines: Baselines, conditions: Conditions, loads: Mapping[str, Load], allowed: Sequence[str]
) -> Baseline:
    """The baseline given by ``--baseline``: picked from a directory, or opened as by :func:`open_measured`."""
    if is_picked(text):
        return Baselines(located(text)).pick(conditions, loads, allowed)
    return open_measured(text, baselines)


def is_picked(text: str) -> bool:
    """Whether ``--baseline`` names a directory of baselines, from which a matching one is picked."""
    path = located(text)
    return path.is_dir() and not (path / LOCK.file).exists()


def open_compared(text: str, baselines: Baselines) -> Baseline:
    """Like :func:`open_measured`, but also accepts a run of ``trtx eval``, which has only scores."""
    path = located(text)
    return of_scored_run(path) if is_evaluation(path) else open_measured(text, baselines)


def open_measured(text: str, baselines: Baselines) -> Baseline:
    """Opens a run directory, a baseline's file, or a named baseline. Raises UsageError for anything else."""
    path = located(text)
    if path.is_dir():
        return of_run(path)
    if path.is_file():
        try:
            return read_baseline(path)
        except UsageError as error:
            raise UsageError(f"{quoted(text)} can't be read as a baseline: {error}") from error
    if "/" in text:
        raise UsageError(
            f"{quoted(text)} does not exist; expected a run directory, a baseline's file, or the name of one"
        )
    try:
        return baselines.get(text)
    except UsageError as error:
        raise UsageError(f"{quoted(text)} is not a run directory or file, and {error}") from error


def located(text: str) -> Path:
    """``text`` as a path. Raises UsageError for an impossible path."""
    if problem := path_problem(Path(text)):
        raise UsageError(f"{quoted(text)} {problem}; expected a run directory, a baseline's file, or the name of one")
    return Path(text)


def _named(path: Path) -> Baseline:
    """The baseline in a file. Its name is that of the file, which may have been renamed."""
    return replace(read_baseline(path), name=path.stem)


def _others(one: Baseline, other: Baseline) -> list[Difference]:
    return [found for found in differences(one.conditions, other.conditions) if found.group in COMPARED_BY]


def _counts(found: Difference, allowed: Sequence[str]) -> bool:
    return found.group in COMPARED_BY and found.name not in allowed and found.group not in allowed

"""A sweep: one aiperf call per trial against a target, supervised while it runs. Cells are written as trials end."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trtx.bench.aiperf.command import TrialFiles, command, complaint, tail
from trtx.bench.aiperf.process import Aiperf, AiperfHost
from trtx.bench.cells import CELL, Cell, cell_directory, cell_name, measure_cell, read_cell, trial_directory
from trtx.bench.digests import changes_since, digest_of_text, digests_of
from trtx.bench.files import write_text
from trtx.bench.intact import Digests, cell_digests_in, digests_in
from trtx.bench.journal import (
    CellEnded,
    CellWritten,
    Journal,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialLengthened,
    TrialStarted,
    read_journal,
)
from trtx.bench.judge.steadiness import Steadiness, judge_warm_up
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.metrics import request_count
from trtx.bench.phases import Phases, phases_of, sent_in
from trtx.bench.readings import ServerReading, write_readings
from trtx.bench.records import RECORDS_FILE, read_trial
from trtx.bench.sent_dataset import prepare_dataset
from trtx.bench.stage_rows import write_rows
from trtx.bench.trial_readings import Watch
from trtx.errors import LoadGeneratorError

POLL_S = 0.25
# aiperf 0.13.0 waits forever for a request that one of its workers lost. The limit allows a full request timeout in the
# previous phase and in the current one, plus time for aiperf to create prompts and write results.
_REQUESTS_IN_A_ROW, _BETWEEN_REQUESTS_S = 2, 600.0
_LENGTHENED = 3  # factor by which a warm-up that wasn't steady is lengthened
_ERROR_LINE = re.compile(r"\bERROR\b\W*(.*)")


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """The unit of one aiperf call: one trial of one cell. Trials are resumed and fail individually."""

    load: Load
    number: int  # from 1


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """Progress of a sweep: the current trial of a cell, and how many of its requests have ended."""

    cell: str
    trial: int
    trials: int
    phase: Literal["starting", "running", "ended"]
    requests: int  # ended requests, warm-up included
    requests_total: int


def planned_trials(spec: LoadSpec) -> tuple[PlannedTrial, ...]:
    """All trials of a sweep on one topology, in order.

    The first trials of all cells precede any second trial, so that a slow drift of the machine affects all loads alike.
    """
    return tuple(PlannedTrial(load, number) for number in range(1, spec.trials + 1) for load in spec.loads)


def sweep(
    host: AiperfHost,
    target: Target,
    spec: LoadSpec,
    run_dir: Path,
    *,
    trials: Sequence[PlannedTrial] | None = None,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
    still_serving: Callable[[], None] = lambda: None,
    restarts: Callable[[], Sequence[str]] | None = None,
    read_server: Callable[[], ServerReading] | None = None,
    take_rows: Callable[[], Sequence[str]] | None = None,
) -> tuple[Cell, ...]:
    """Measures ``trials`` of ``spec`` (None: all) against ``target``, in order, and returns their cells.

    Writes ``cells/<topology>-<load>/{cell.json, trial-NN/<aiperf's files>}`` under ``run_dir`` as each trial ends, and
    lines of ``journal.jsonl``. If the sweep ends early for any reason (including an interrupt), the cell with the
    trials so far is written first.

    ``still_serving`` is called between polls and ends the sweep by raising. ``restarts`` returns the processes of the
    topology that have been restarted so far (None: not supervised). ``read_server`` is called about once a second in
    its own thread (None: no readings are available). ``take_rows`` returns the lines that workers have written about
    ended requests since its last call (None: they write none, or not here).

    Raises LoadGeneratorError if aiperf's first call measured nothing, or if no request ends for much longer than the
    request timeout. A later call that measures nothing counts as a failure of its cell.
    """
    trials = planned_trials(spec) if trials is None else trials
    journal = Journal(run_dir)
    names = dict.fromkeys(cell_name(target.topology, trial.load) for trial in trials)
    journal.note(SweepStarted(topology=target.topology, model=target.model, cells=tuple(names)))
    has_measured = False
    for trial in trials:
        measured = _Measured(host, target, spec, run_dir, trial, restarts, read_server, take_rows)
        measured.run(on_progress, still_serving)
        if measured.is_empty and not has_measured:
            raise LoadGeneratorError(
                f"aiperf exited {measured.exit_code} and measured nothing of {target.topology}: "
                f"{complaint(measured.files.console)}; expected records of {len(names)} cells; "
                f"its log is {measured.files.console}"
            )
        has_measured = True
    journal.note(SweepEnded(topology=target.topology))
    return tuple(read_cell(run_dir, name) for name in names)


def held_trials(run_dir: Path, target: Target, spec: LoadSpec) -> tuple[PlannedTrial, ...]:
    """The trials of an earlier attempt that have a result, according to aiperf's files.

    The cell files aren't sufficient: a killed run may not have written its cell, and files may have been removed or
    changed since.
    """
    digests = digests_in(read_journal(run_dir))
    return tuple(trial for load in spec.loads for trial in _held(run_dir, target, spec, load, digests))


def changed_files(run_dir: Path, target: Target, spec: LoadSpec) -> tuple[str, ...]:
    """For trials that ended but are no longer usable: one sentence for each file that has changed since."""
    digests = digests_in(read_journal(run_dir))
    held = held_trials(run_dir, target, spec)
    changed: list[str] = []
    for trial in planned_trials(spec):
        name = cell_name(target.topology, trial.load)
        directory = trial_directory(cell_directory(run_dir, name), trial.number)
        if trial in held or not directory.is_dir():  # an earlier resumption has set it aside
            continue
        changes = changes_since(directory, digests.get((name, trial.number), {}))
        changed += [f"{name}/{one}" for one in (*changes.changed, *(f"{file} is gone" for file in changes.gone))]
    return tuple(changed)


def rewrite_cells(run_dir: Path, target: Target, spec: LoadSpec) -> None:
    """Rewrites every cell that has usable trials, from these trials alone."""
    digests = digests_in(read_journal(run_dir))
    for load in spec.loads:
        if numbers := [trial.number for trial in _held(run_dir, target, spec, load, digests)]:
            name = cell_name(target.topology, load)
            directory = cell_directory(run_dir, name)
            restarted = _restarted(run_dir, name, numbers)
            cell = measure_cell(directory, target, spec, load, numbers, restarted=restarted)
            _write_noted(Journal(run_dir), directory, cell)


def _write_noted(journal: Journal, directory: Path, cell: Cell) -> None:
    """Writes a cell after its digest, unless the same content and digest are already there.

    The digest comes first; if the run is killed in between, the file still matches the previous digest.
    """
    text = CELL.text(cell.to_json())
    digest = digest_of_text(text)
    noted = cell_digests_in(read_journal(journal.path.parent)).get(cell.name, ())[-1:]
    if noted != (digest,) or digests_of(directory, (CELL.file,)).get(CELL.file) != digest:
        journal.note(CellWritten(cell=cell.name, file=digest))
        write_text(directory / CELL.file, text)


def _held(run_dir: Path, target: Target, spec: LoadSpec, load: Load, digests: Digests) -> list[PlannedTrial]:
    name = cell_name(target.topology, load)
    directory = cell_directory(run_dir, name)
    intact = [
        number
        for number in range(1, spec.trials + 1)
        if trial_directory(directory, number).exists()
        and not changes_since(trial_directory(directory, number), digests.get((name, number), {})).changed
    ]
    return [
        PlannedTrial(load, trial.number)
        for trial in measure_cell(directory, target, spec, load, intact).trials
        # Without its last file, aiperf was killed while writing, except when all requests failed: then it writes no
        # result.
        if trial.figures is not None
        and (TrialFiles(directory / trial.directory).ended or not trial.figures[request_count])
    ]


def _restarted(run_dir: Path, cell: str, trials: Sequence[int]) -> tuple[str, ...] | None:
    """Processes restarted during these trials; None if any trial was not supervised."""
    ended = {
        event.trial: event.restarted
        for event in read_journal(run_dir)
        if isinstance(event, TrialEnded) and event.cell == cell
    }
    found = [ended.get(number) for number in trials]
    known = [names for names in found if names is not None]
    return None if len(known) < len(found) else tuple(name for names in known for name in names)


class _Measured:
    """One trial while aiperf runs it; progress is read from aiperf's files."""

    def __init__(
        self,
        host: AiperfHost,
        target: Target,
        spec: LoadSpec,
        run_dir: Path,
        trial: PlannedTrial,
        restarts: Callable[[], Sequence[str]] | None,
        read_server: Callable[[], ServerReading] | None,
        take_rows: Callable[[], Sequence[str]] | None,
    ) -> None:
        self.host, self.target, self.spec, self.trial, self.run_dir = host, target, spec, trial, run_dir
        self.journal = Journal(run_dir)
        self.name = cell_name(target.topology, trial.load)
        self.cell_directory = cell_directory(run_dir, self.name)
        self.files = TrialFiles(trial_directory(self.cell_directory, trial.number))
        self.exit_code: int | None = None
        self._warmup_request_count = trial.load.warmup_request_count
        self._restarts = restarts
        self._read_server = read_server
        self._take_rows = take_rows
        self._attempt = 0
        self._moved_at = time.monotonic()
        self._last_seen: tuple[object, ...] = ()

    def run(self, on_progress: Callable[[SweepProgress], None], still_serving: Callable[[], None]) -> None:
        """Runs the trial, and repeats it with a longer warm-up if the first warm-up wasn't steady."""
        self._run_once(on_progress, still_serving)
        if (why := self._why_not_warm()) is not None:
            self._warmup_request_count *= _LENGTHENED
            self.journal.note(
                TrialLengthened(
                    cell=self.name, trial=self.trial.number, warmup_request_count=self._warmup_request_count, why=why
                )
            )
            aside = self.files.directory.with_name(f"{self.files.directory.name}-short-warm-up")
            shutil.rmtree(aside, ignore_errors=True)
            self.files.directory.rename(aside)
            self._run_once(on_progress, still_serving)
        on_progress(self._progress("ended"))

    def _run_once(self, on_progress: Callable[[SweepProgress], None], still_serving: Callable[[], None]) -> None:
        load = replace(self.trial.load, warmup_request_count=self._warmup_request_count)
        self._attempt += 1
        sent = prepare_dataset(self.spec, self.run_dir, self.target)
        argv = command(self.target, sent, load, self.trial.number, self.files.directory, attempt=self._attempt)
        self.journal.note(TrialStarted(cell=self.name, trial=self.trial.number, argv=argv))
        on_progress(self._progress("starting"))
        before = None if self._restarts is None else len(self._restarts())
        self.exit_code = None
        watch = Watch(self._read_server)
        take_rows = self._take_rows or (lambda: ())
        take_rows()  # rows of requests before this trial
        rows: list[str] = []
        try:
            with watch, Aiperf(self.host, argv, self.files.console) as aiperf:
                while (code := aiperf.poll(POLL_S)) is None:
                    if (self.files.directory / RECORDS_FILE).exists():
                        on_progress(self._progress("running"))
                    rows += take_rows()
                    self._check_moves()
                    still_serving()
                self.exit_code = code
        finally:
            restarted = None if self._restarts is None else tuple(self._restarts()[before:])
            try:
                if watch.readings and self.files.directory.is_dir():
                    write_readings(self.files.directory, watch.readings)
                rows += take_rows()
                if rows and self.files.directory.is_dir():
                    write_rows(self.files.directory, rows)
            finally:
                self.journal.note(
                    TrialEnded(
                        cell=self.name, trial=self.trial.number, aiperf_exit_code=self.exit_code, restarted=restarted,
                        files=digests_of(self.files.directory),
                    )
                )  # fmt: skip
            cell = self._write()
            if len(cell.trials) == self.spec.trials:
                self.journal.note(CellEnded(cell=cell.name, status=cell.status, failure=cell.failure))

    def _why_not_warm(self) -> str | None:
        """The reason why the warm-up wasn't steady at its end; None if it was, or if that can't be decided."""
        if not self.files.ended or not self._warmup_request_count:
            return None
        trial, concurrency = (
            read_trial(self.files.directory / RECORDS_FILE),
            self.spec.held_concurrency(self.trial.load),
        )
        measured = phases_of(trial.measured, concurrency)
        if not isinstance(measured, Phases):
            return None
        steady = sent_in(trial.measured, measured.steady)
        judged = judge_warm_up(phases_of(trial.warm_up, concurrency), trial.warm_up, steady)
        return judged.reason if judged.steadiness is Steadiness.NOT_STEADY else None

    @property
    def is_empty(self) -> bool:
        """Whether aiperf left no records."""
        return _size(self.files.directory / RECORDS_FILE) == 0

    def _write(self) -> Cell:
        """Writes the cell with this trial and the earlier ones."""
        failures = {} if self.files.ended else {self.trial.number: self._failure()}
        numbers = range(1, self.spec.trials + 1)
        started = [number for number in numbers if trial_directory(self.cell_directory, number).exists()]
        cell = measure_cell(
            self.cell_directory, self.target, self.spec, self.trial.load, started,
            failures=failures, restarted=_restarted(self.run_dir, self.name, started),
        )  # fmt: skip
        _write_noted(self.journal, self.cell_directory, cell)
        return cell

    def _failure(self) -> str:
        """One sentence that says why this trial has no result."""
        if self.exit_code is None:
            return "stopped before it ended"
        errors = _ERROR_LINE.findall(tail(self.files.log, 200))
        reason = f": {errors[0][:300]}" if errors else ""
        return f"aiperf exited {self.exit_code} without a result{reason}"

    def _check_moves(self) -> None:
        """Raises LoadGeneratorError if no request has ended for too long although aiperf is still running."""
        seen = (self.files.ended, _size(self.files.directory / RECORDS_FILE))
        now = time.monotonic()
        if seen != self._last_seen:
            self._last_seen, self._moved_at = seen, now
        patience = _REQUESTS_IN_A_ROW * self.spec.request_timeout_s + _BETWEEN_REQUESTS_S
        if now - self._moved_at > patience:
            raise LoadGeneratorError(
                f"aiperf reported no finished request of {self.target.topology} for {patience:.0f} s, although "
                f"request_timeout_s is {self.spec.request_timeout_s:g}, so trtx ended it; its log is "
                f"{self.files.console}"
            )

    def _progress(self, phase: Literal["starting", "running", "ended"]) -> SweepProgress:
        load = self.trial.load
        return SweepProgress(
            cell=self.name,
            trial=self.trial.number,
            trials=self.spec.trials,
            phase=phase,
            requests=_lines(self.files.directory / RECORDS_FILE),
            requests_total=self._warmup_request_count + load.request_count,
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0

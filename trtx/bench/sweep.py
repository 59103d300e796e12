"""One sweep: aiperf against a target, watched while it runs, cells written as they end."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtx.bench.aiperf import Aiperf, RunFiles, command, complaint, run_files, tail
from trtx.bench.cells import Cell, cell_directory, cell_name, measure_cell, write_cell
from trtx.bench.journal import CellEnded, Journal, SweepEnded, SweepStarted, TrialEnded
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.records import RECORDS_FILE
from trtx.errors import LoadGeneratorError

POLL_S = 0.25
# aiperf 0.13.0 waits for ever for a request that one of its workers lost. Each request ends within its timeout, in the
# phase before it and in its own; the rest is for what aiperf does between: prompts are made, results are written.
_REQUESTS_IN_A_ROW, _BETWEEN_REQUESTS_S = 2, 600.0
_ERROR_LINE = re.compile(r"\bERROR\b\W*(.*)")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a sweep is: one cell's trial, and how many of its requests have ended."""

    cell: str
    trial: int
    trials: int
    phase: Literal["starting", "running", "ended"]
    requests: int  # ended, warm-up included
    requests_total: int
    cells_ended: int
    cells_total: int
    elapsed_s: float


def sweep(
    target: Target,
    spec: LoadSpec,
    run_dir: Path,
    *,
    loads: Sequence[Load] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    still_serving: Callable[[], None] = lambda: None,
    on_start: Callable[[int, Path], None] = lambda session, scratch: None,
) -> tuple[Cell, ...]:
    """Measures ``loads`` of ``spec`` (None: all) against ``target`` and returns the cells, in the order measured.

    Under ``run_dir`` it writes ``cells/<mode>-c<concurrency>/{cell.json, trial-NN/<aiperf's files>}``,
    ``aiperf/<mode>/`` with aiperf's log and its own aggregates, and a line of ``journal.jsonl`` as each cell ends.
    ``still_serving`` is called between looks and ends the sweep by raising. Whatever ends it early (that, or
    an interrupt), the cells measured until then are written first. ``on_start`` gets aiperf's session and its temporary
    directory. Raises LoadGeneratorError when aiperf measured none, or when no request ends for much longer than the
    request timeout.
    """
    loads = spec.loads if loads is None else loads
    staging = staging_directory(run_dir, target.mode)
    staging.mkdir(parents=True, exist_ok=True)
    watch = _Watch(target, spec, loads, run_dir, on_progress)
    cells_ahead = [cell_name(target.mode, load.concurrency) for load in loads]
    argv = command(target, spec, loads, staging)
    watch.journal.note(SweepStarted(mode=target.mode, model=target.model, cells=tuple(cells_ahead), argv=argv))
    exit_code = None
    try:
        with Aiperf(argv, staging / "aiperf.log", on_start, target.api_key) as aiperf:
            while (exit_code := aiperf.poll()) is None:
                watch.look()
                watch.check_moves()
                still_serving()
                time.sleep(POLL_S)
            watch.look()
    finally:
        # Only now: aiperf reads its runs' files again for its aggregates when the last one has ended.
        cells = watch.collect(exit_code)
        watch.journal.note(SweepEnded(mode=target.mode, aiperf_exit_code=exit_code))
    if not any(cell.figures for cell in cells):
        raise LoadGeneratorError(
            f"aiperf exited {exit_code} and measured nothing in mode {target.mode}: "
            f"{complaint(staging / 'aiperf.log')}; expected records of {len(loads)} cells; "
            f"its log is {staging / 'aiperf.log'}"
        )
    return cells


def staging_directory(run_dir: Path, mode: str) -> Path:
    """Where aiperf writes while it measures one mode."""
    return run_dir / "aiperf" / mode


def collect_ended(
    target: Target, spec: LoadSpec, loads: Sequence[Load], run_dir: Path, *, dry_run: bool = False
) -> tuple[Load, ...]:
    """Writes the cells of a killed sweep of ``loads`` whose trials had all ended, and returns their loads.

    :func:`sweep` does so itself however it ends, unless it is killed with SIGKILL. ``dry_run`` writes nothing.
    """
    watch = _Watch(target, spec, loads, run_dir)
    return tuple(load for load in loads if watch.collect_ended(load, dry_run=dry_run))


class _Watch:
    """Follows one aiperf call by its files, and turns them into cells."""

    def __init__(
        self,
        target: Target,
        spec: LoadSpec,
        loads: Sequence[Load],
        run_dir: Path,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.target, self.spec, self.loads, self.run_dir = target, spec, loads, run_dir
        self.journal = Journal(run_dir)
        self._on_progress = on_progress
        self._runs = run_files(staging_directory(run_dir, target.mode), loads, spec.trials)
        self._ended: set[tuple[str, int]] = set()
        self._started_at = self._moved_at = time.monotonic()
        self._last_seen: tuple[object, ...] = ()

    def look(self) -> None:
        """Reports the run that is under way, and notes those that have ended since the last look."""
        current: RunFiles | None = None
        for run in self._runs:
            key = (run.load.label, run.trial)
            if key in self._ended or not run.started:
                continue
            current = run
            if run.ended:
                self._ended.add(key)
                cell = cell_name(self.target.mode, run.load.concurrency)
                self.journal.note(TrialEnded(cell=cell, trial=run.trial))
                self._report(run, "ended")
        if current is not None and (current.load.label, current.trial) not in self._ended:
            self._report(current, "running" if (current.directory / RECORDS_FILE).exists() else "starting")

    def check_moves(self) -> None:
        """Raises LoadGeneratorError when for too long no request and no run has ended, and none has begun."""
        seen = tuple((run.started, run.ended, _size(run.directory / RECORDS_FILE)) for run in self._runs)
        now = time.monotonic()
        if seen != self._last_seen:
            self._last_seen, self._moved_at = seen, now
        patience = _REQUESTS_IN_A_ROW * self.spec.request_timeout_s + _BETWEEN_REQUESTS_S
        if now - self._moved_at > patience:
            raise LoadGeneratorError(
                f"aiperf told of no request for {patience:.0f} s in mode {self.target.mode}, although each ends within "
                f"{self.spec.request_timeout_s:g} s (request_timeout_s), so it was ended; "
                f"its log is {staging_directory(self.run_dir, self.target.mode) / 'aiperf.log'}"
            )

    def collect(self, exit_code: int | None) -> tuple[Cell, ...]:
        """Moves each run's files to its cell, computes the figures, writes cells that have any run started."""
        cells = []
        for load in self.loads:
            runs = self._of(load)
            if not any(run.started for run in runs) and exit_code is None:
                continue  # stopped before its turn
            cells.append(self._collect_cell(load, runs, exit_code))
        return tuple(cells)

    def collect_ended(self, load: Load, *, dry_run: bool) -> bool:
        """Collects one cell if all its trials have ended and are still where aiperf wrote them."""
        runs = self._of(load)
        has_ended = all(run.ended for run in runs)
        if has_ended and not dry_run:
            self._collect_cell(load, runs, None)
        return has_ended

    def _of(self, load: Load) -> list[RunFiles]:
        return [run for run in self._runs if run.load == load]

    def _collect_cell(self, load: Load, runs: list[RunFiles], exit_code: int | None) -> Cell:
        directory = cell_directory(self.run_dir, self.target.mode, load.concurrency)
        failures = {run.trial: _failure(run, exit_code) for run in runs if not run.ended}
        for run in runs:
            if run.started:
                directory.mkdir(parents=True, exist_ok=True)
                shutil.move(run.directory, directory / f"trial-{run.trial:02d}")
        cell = measure_cell(directory, self.target, load, failures, self.spec.trials)
        write_cell(directory, cell)
        self.journal.note(CellEnded(cell=cell.name, status=cell.status, failure=cell.failure))
        return cell

    def _report(self, run: RunFiles, phase: Literal["starting", "running", "ended"]) -> None:
        self._on_progress(
            Progress(
                cell=cell_name(self.target.mode, run.load.concurrency),
                trial=run.trial,
                trials=self.spec.trials,
                phase=phase,
                requests=_lines(run.directory / RECORDS_FILE),
                requests_total=run.load.warmup_request_count + run.load.request_count,
                cells_ended=len(self._ended),
                cells_total=len(self._runs),
                elapsed_s=time.monotonic() - self._started_at,
            )
        )


def _failure(run: RunFiles, exit_code: int | None) -> str:
    """One sentence: why this run has no result."""
    if exit_code is None:
        return "stopped before it ended" if run.started else "stopped before it began"
    errors = _ERROR_LINE.findall(tail(run.directory / "logs" / "aiperf.log", 200))
    reason = f": {errors[0][:300]}" if errors else ""
    return f"aiperf exited {exit_code} without a result{reason}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0

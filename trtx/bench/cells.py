"""A cell is one (mode, concurrency) of a sweep: its trials, its figures, and its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.bench.failures import Reasons, merge_reasons
from trtx.bench.files import write_json
from trtx.bench.load import Load, Target
from trtx.bench.metrics import (
    Distribution,
    Figures,
    Range,
    figures,
    most_common_errors,
    output_token_throughput_per_device,
)
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records
from trtx.errors import UsageError

SCHEMA_VERSION = 2  # 2: a request succeeds only with a whole answer; in 1, with any answer that aiperf took
CELL_FILE = "cell.json"

# ok: every request succeeded. uncounted: so they did, but answers lack usage, so figures do. errors: requests failed.
# failed: aiperf left no usable records. Of a cell's trials, the worst counts.
Status = Literal["ok", "uncounted", "errors", "failed"]
_FROM_BAD: tuple[Status, ...] = ("failed", "errors", "uncounted")
Device = Literal["gpu", "worker"]
_RANGES = ("input_sequence_lengths", "output_sequence_lengths")


@dataclass(frozen=True, slots=True)
class Trial:
    """One aiperf run of a cell. ``directory`` is relative to the cell's own."""

    number: int  # from 1
    status: Status
    directory: str
    figures: Figures | None
    errors: Reasons = ()
    failure: str | None = None  # why there are no figures


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured at one concurrency of one mode."""

    mode: str
    concurrency: int
    device: Device  # what "per device" means
    device_count: int
    load: Load
    trials: tuple[Trial, ...]
    figures: Figures | None  # over all trials that gave any

    @property
    def name(self) -> str:
        return cell_name(self.mode, self.concurrency)

    @property
    def status(self) -> Status:
        statuses = {trial.status for trial in self.trials}
        return next((bad for bad in _FROM_BAD if bad in statuses), "ok" if statuses else "failed")

    @property
    def failure(self) -> str | None:
        return next((trial.failure for trial in self.trials if trial.failure), None)

    @property
    def errors(self) -> Reasons:
        """Why requests failed, over all trials, most frequent first."""
        return merge_reasons(trial.errors for trial in self.trials)

    @property
    def output_token_throughput_per_device(self) -> float | None:
        """Tokens/s per GPU of the topology, or per worker where there is none."""
        total = self.figures.output_token_throughput if self.figures else None
        return output_token_throughput_per_device(total, self.device_count)

    def has_files(self, run_dir: Path) -> bool:
        """The records that its figures come from are still there."""
        directory = cell_directory(run_dir, self.mode, self.concurrency)
        return all((directory / trial.directory / RECORDS_FILE).exists() for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        document = {"schema_version": SCHEMA_VERSION, "name": self.name, "status": self.status}
        return {
            **document,
            **dataclasses.asdict(self),
            "output_token_throughput_per_device": self.output_token_throughput_per_device,
        }


def cell_name(mode: str, concurrency: int) -> str:
    return f"{mode}-c{concurrency}"


def cell_directory(run_dir: Path, mode: str, concurrency: int) -> Path:
    return run_dir / "cells" / cell_name(mode, concurrency)


def measure_cell(directory: Path, target: Target, load: Load, trial_failures: dict[int, str], trials: int) -> Cell:
    """Reads what aiperf left under ``directory``/trial-NN and computes the figures.

    ``trial_failures`` says, by trial number, why aiperf ended a trial without a result.
    """
    measured: list[Trial] = []
    records: list[tuple[RequestRecord, ...]] = []
    for number in range(1, trials + 1):
        name = f"trial-{number:02d}"
        path = directory / name / RECORDS_FILE
        of_trial: tuple[RequestRecord, ...] = ()
        failure = None
        try:
            of_trial = read_records(path) if path.exists() else ()
        except ValueError:  # as a disk leaves it that filled while aiperf wrote: what there is of it is no trial
            failure = trial_failures.get(number, f"aiperf's records break off within a line of {path}")
        failure = failure or _why_unusable(of_trial, load, trial_failures.get(number))
        if failure is None:
            of_this = figures([of_trial])
            measured.append(Trial(number, _status(of_this), name, of_this, most_common_errors(of_trial)))
            records.append(of_trial)
        else:
            measured.append(Trial(number, "failed", name, None, most_common_errors(of_trial), failure))
    device: Device = "gpu" if target.gpu_count else "worker"
    return Cell(
        mode=target.mode,
        concurrency=load.concurrency,
        device=device,
        device_count=target.gpu_count or target.worker_count,
        load=load,
        trials=tuple(measured),
        figures=figures(records) if records else None,
    )


def _why_unusable(records: Sequence[RequestRecord], load: Load, failure: str | None) -> str | None:
    """None where every measured request has its record, also when ``failure`` says that aiperf ended badly over it.

    aiperf 0.13.0 exits 1 and writes no result when all requests failed. That is the server's failure, not aiperf's.
    """
    if len(records) == load.request_count and (failure is None or not any(record.succeeded for record in records)):
        return None
    return failure or f"aiperf left records of {len(records)} of {load.request_count} measured requests"


def _status(measured: Figures) -> Status:
    return "errors" if measured.error_request_count else "uncounted" if measured.uncounted_request_count else "ok"


def write_cell(directory: Path, cell: Cell) -> None:
    write_json(directory / CELL_FILE, cell.to_json())


def read_cells(run_dir: Path) -> tuple[Cell, ...]:
    """The finished cells of a run: agg before disagg, each by rising concurrency."""
    cells = (_cell(path) for path in (run_dir / "cells").glob(f"*/{CELL_FILE}"))
    return tuple(sorted(cells, key=lambda cell: (cell.mode, cell.concurrency)))


def _cell(path: Path) -> Cell:
    document = json.loads(path.read_text(encoding="utf-8"))
    if (version := document.get("schema_version")) != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {version!r}, this trtx reads {SCHEMA_VERSION}; "
            "its requests were judged by other rules, so start a new run"
        )
    return Cell(
        mode=document["mode"],
        concurrency=document["concurrency"],
        device=document["device"],
        device_count=document["device_count"],
        load=Load(**document["load"]),
        trials=tuple(_trial(entry) for entry in document["trials"]),
        figures=_figures(document["figures"]),
    )


def _trial(entry: dict[str, Any]) -> Trial:
    errors = tuple((message, count) for message, count in entry["errors"])
    return Trial(**{**entry, "errors": errors, "figures": _figures(entry["figures"])})


def _figures(entry: dict[str, Any] | None) -> Figures | None:
    if entry is None:
        return None
    values: dict[str, Any] = {
        key: (Range if key in _RANGES else Distribution)(**value) if isinstance(value, dict) else value
        for key, value in entry.items()
    }
    return Figures(**values)

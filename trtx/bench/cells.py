"""A cell is one (mode, concurrency) of a sweep: its trials, its figures, and its file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.bench.files import write_json
from trtx.bench.load import Load, Target
from trtx.bench.metrics import (
    Distribution,
    Figures,
    figures,
    most_common_errors,
    output_token_throughput_per_device,
)
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records
from trtx.errors import UsageError

SCHEMA_VERSION = 1
CELL_FILE = "cell.json"

# ok: every request succeeded. errors: measured, but requests failed. failed: aiperf left no usable records.
Status = Literal["ok", "errors", "failed"]
Device = Literal["gpu", "worker"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One aiperf run of a cell. ``directory`` is relative to the cell's own."""

    number: int  # from 1
    status: Status
    directory: str
    figures: Figures | None
    errors: tuple[tuple[str, int], ...] = ()  # message, how often
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
        return "failed" if "failed" in statuses or not statuses else "errors" if "errors" in statuses else "ok"

    @property
    def failure(self) -> str | None:
        return next((trial.failure for trial in self.trials if trial.failure), None)

    @property
    def errors(self) -> tuple[tuple[str, int], ...]:
        return tuple(error for trial in self.trials for error in trial.errors)

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

    ``trial_failures`` says, by trial number, why a trial without records has none.
    """
    measured: list[Trial] = []
    records: list[tuple[RequestRecord, ...]] = []
    for number in range(1, trials + 1):
        name = f"trial-{number:02d}"
        path = directory / name / RECORDS_FILE
        of_trial = read_records(path) if path.exists() else ()
        if of_trial and number not in trial_failures:
            of_this = figures([of_trial])
            status: Status = "errors" if of_this.error_request_count else "ok"
            measured.append(Trial(number, status, name, of_this, most_common_errors(of_trial)))
            records.append(of_trial)
        else:
            failure = trial_failures.get(number, "aiperf left no record of a measured request")
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
            "render it with the trtx that it is from"
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
        key: Distribution(**value) if isinstance(value, dict) else value for key, value in entry.items()
    }
    return Figures(**values)

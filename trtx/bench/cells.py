"""A cell is one (mode, concurrency) of a sweep: its trials, its figures, and its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from trtx.bench.documents import Document
from trtx.bench.failures import Reasons, merge_reasons
from trtx.bench.figures import FIRST_SCHEMA, Figure, Figures, PerDevice, all_figures, latest_schema
from trtx.bench.load import Load, Target
from trtx.bench.metrics import error_request_count, most_common_errors, uncounted_request_count
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_records

CELL = Document(
    "cell.json",
    version=latest_schema(),  # 3: the range of the lengths
    oldest=FIRST_SCHEMA,
    since="its requests were judged by other rules",  # in 1 any answer succeeded that aiperf took
)

# ok: every request succeeded. uncounted: so they did, but answers lack usage, so figures do. errors: requests failed.
# failed: aiperf left no usable records. Of a cell's trials, the worst counts.
CellStatus = Literal["ok", "uncounted", "errors", "failed"]
_FROM_BAD: tuple[CellStatus, ...] = ("failed", "errors", "uncounted")
DeviceKind = Literal["gpu", "worker"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """One aiperf run of a cell. ``directory`` is relative to the cell's own."""

    number: int  # from 1
    status: CellStatus
    directory: str
    figures: Figures | None
    errors: Reasons
    failure: str | None  # why there are no figures


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured at one concurrency of one mode."""

    mode: str
    concurrency: int
    device: DeviceKind  # what "per device" means
    device_count: int | None  # None: not known, so there is no figure per device
    load: Load
    trials: tuple[Trial, ...]
    figures: Figures | None  # over all trials that gave any

    @property
    def name(self) -> str:
        return cell_name(self.mode, self.concurrency)

    @property
    def status(self) -> CellStatus:
        statuses = {trial.status for trial in self.trials}
        return next((bad for bad in _FROM_BAD if bad in statuses), "ok" if statuses else "failed")

    @property
    def failure(self) -> str | None:
        return next((trial.failure for trial in self.trials if trial.failure), None)

    @property
    def errors(self) -> Reasons:
        """Why requests failed, over all trials, most frequent first."""
        return merge_reasons(trial.errors for trial in self.trials)

    def value(self, figure: Figure[T]) -> T | None:
        """Of its record, over all trials; None where it can't be computed."""
        return None if self.figures is None else figure.read(self.figures, self.device_count)

    def to_json(self) -> dict[str, Any]:
        """As it is kept: what follows from the rest stands in it for other programs."""
        return {
            "name": self.name,
            "status": self.status,
            **TypeAdapter(Cell).dump_python(self, mode="json"),
            **{figure.name: self.value(figure) for figure in all_figures() if isinstance(figure, PerDevice)},
        }


def cell_name(mode: str, concurrency: int) -> str:
    return f"{mode}-c{concurrency}"


def cell_directory(run_dir: Path, mode: str, concurrency: int) -> Path:
    return run_dir / "cells" / cell_name(mode, concurrency)


def trial_directory(cell: Path, number: int) -> Path:
    return cell / f"trial-{number:02d}"


def measure_cell(
    directory: Path, target: Target, load: Load, trial_failures: Mapping[int, str], trials: Sequence[int]
) -> Cell:
    """Reads what aiperf left under ``directory``/trial-NN, of each of the ``trials``, and computes the figures.

    ``trial_failures`` says, by trial number, why aiperf ended a trial without a result.
    """
    measured: list[Trial] = []
    usable: list[tuple[RequestRecord, ...]] = []
    for number in trials:
        name = trial_directory(directory, number).name
        path = directory / name / RECORDS_FILE
        of_trial: tuple[RequestRecord, ...] = ()
        failure = None
        try:
            of_trial = read_records(path) if path.exists() else ()
        except ValueError:  # as a disk leaves it that filled while aiperf wrote: what there is of it is no trial
            failure = trial_failures.get(number, f"aiperf's records break off within a line of {path}")
        failure = failure or _why_unusable(of_trial, load, trial_failures.get(number))
        if failure is None:
            of_this = Figures.over([of_trial])
            measured.append(Trial(number, _status(of_this), name, of_this, most_common_errors(of_trial), None))
            usable.append(of_trial)
        else:
            measured.append(Trial(number, "failed", name, None, most_common_errors(of_trial), failure))
    device: DeviceKind = "gpu" if target.gpu_count else "worker"
    return Cell(
        mode=target.mode,
        concurrency=load.concurrency,
        device=device,
        device_count=target.gpu_count or target.worker_count,
        load=load,
        trials=tuple(measured),
        figures=Figures.over(usable) if usable else None,
    )


def _why_unusable(records: Sequence[RequestRecord], load: Load, failure: str | None) -> str | None:
    """None where every measured request has its record, also when ``failure`` says that aiperf ended badly over it.

    aiperf 0.13.0 exits 1 and writes no result when all requests failed. That is the server's failure, not aiperf's.
    """
    if len(records) == load.request_count and (failure is None or not any(record.succeeded for record in records)):
        return None
    return failure or f"aiperf left records of {len(records)} of {load.request_count} measured requests"


def _status(measured: Figures) -> CellStatus:
    return "errors" if measured[error_request_count] else "uncounted" if measured[uncounted_request_count] else "ok"


def read_cell(run_dir: Path, name: str) -> Cell:
    """One cell of a run. Or UsageError: file and field."""
    return CELL.read(run_dir / "cells" / name, Cell)


def write_cell(directory: Path, cell: Cell) -> None:
    CELL.write(directory, cell.to_json())


def read_cells(run_dir: Path) -> tuple[Cell, ...]:
    """The finished cells of a run: agg before disagg, each by rising concurrency. Or UsageError: file and field."""
    cells = (CELL.read(path.parent, Cell) for path in (run_dir / "cells").glob(f"*/{CELL.file}"))
    return tuple(sorted(cells, key=lambda cell: (cell.mode, cell.concurrency)))

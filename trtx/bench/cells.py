"""A cell is one load on one topology of a sweep: its trials, its figures, what they are worth, and its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trtx.bench import cores, handoffs
from trtx.bench.documents import RESTORE, Document, plain
from trtx.bench.failures import Reasons, merge_reasons
from trtx.bench.figures import FIRST_SCHEMA, Figure, Figures, PerDevice, all_figures, latest_schema
from trtx.bench.handoffs import HandoffCounts
from trtx.bench.judge.evidence import AskedLength, Evidence, event_loop_delays_ms
from trtx.bench.judge.validity import Validity, judge
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.metrics import error_request_count, most_common_errors, uncounted_request_count
from trtx.bench.pictures import PictureCounts, over_trials
from trtx.bench.readings import (
    GpuReading,
    cpu_over,
    gpus_over,
    handoffs_over,
    pictures_over,
    read_readings,
    requests_over,
    summed,
)
from trtx.bench.records import RECORDS_FILE, RequestRecord, TrialRecords, read_trial
from trtx.bench.windows import Phases, Span, phases_of
from trtx.config.wording import quoted
from trtx.errors import UsageError

CELL = Document(
    "cell.json",
    version=latest_schema(),
    oldest=FIRST_SCHEMA,
    since="a cell was a mode at a concurrency, without a steady part and a validity",
)

# ok: every request succeeded. uncounted: so they did, but answers lack usage, so figures do. errors: requests failed.
# failed: aiperf left no usable records. Of a cell's trials, the worst counts. incomplete: fewer trials than asked.
TrialStatus = Literal["ok", "uncounted", "errors", "failed"]
CellStatus = TrialStatus | Literal["incomplete"]
_FROM_BAD: tuple[TrialStatus, ...] = ("failed", "errors", "uncounted")
_SYSTEM_MESSAGE_TOKENS = 16.0  # a chat template's around a system message, at most: 6 in the tiny model's, 5 in Qwen's
DeviceKind = Literal["gpu", "worker"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """One aiperf run of a cell. ``directory`` is relative to the cell's own."""

    number: int  # from 1
    status: TrialStatus
    directory: str
    figures: Figures | None  # over all measured requests
    steady: Figures | None  # over the steady part alone; None where it has none
    errors: Reasons
    failure: str | None  # why there are no figures


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one load on one topology."""

    topology: str  # its label
    load: Load
    device: DeviceKind  # what "per device" means
    device_count: int | None  # None: not known, so there is no figure per device
    trials_asked: int
    trials: tuple[Trial, ...]
    figures: Figures | None  # over all trials that gave any
    steady: Figures | None  # over their steady parts; None where one of them has none
    validity: Validity | None  # None where there are no figures
    pictures: dict[str, PictureCounts] | None = None  # by role, over all trials; None: no worker told of any
    # By decode and prefill worker, over all trials; empty: it hands nothing over; None: nobody counted.
    handoffs: dict[str, dict[str, HandoffCounts]] | None = None

    @property
    def name(self) -> str:
        return cell_name(self.topology, self.load)

    @property
    def status(self) -> CellStatus:
        statuses = {trial.status for trial in self.trials}
        worst: CellStatus = next((bad for bad in _FROM_BAD if bad in statuses), "ok" if statuses else "failed")
        return "incomplete" if worst in ("ok", "uncounted") and len(self.trials) < self.trials_asked else worst

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
            **plain(self),
            **{figure.name: self.value(figure) for figure in all_figures() if isinstance(figure, PerDevice)},
        }


def cell_name(topology: str, load: Load) -> str:
    """``topology`` "": of a load alone, whatever serves it."""
    return f"{topology}-{load.label}" if topology else load.label


def cell_directory(run_dir: Path, name: str) -> Path:
    return run_dir / "cells" / name


def trial_directory(cell: Path, number: int) -> Path:
    return cell / f"trial-{number:02d}"


def measure_cell(
    directory: Path,
    target: Target,
    spec: LoadSpec,
    load: Load,
    trials: Sequence[int],
    *,
    failures: Mapping[int, str] | None = None,
    restarted: tuple[str, ...] | None = None,
) -> Cell:
    """Reads what aiperf left under ``directory``/trial-NN, of each of the ``trials``, and computes the figures.

    ``failures`` says, by trial number, why aiperf ended a trial without a result; ``restarted`` which processes of the
    topology were started again meanwhile (None: nobody watched).
    """
    measured: list[Trial] = []
    usable: list[TrialRecords] = []
    for number in trials:
        found, records = _measure_trial(
            trial_directory(directory, number), number, spec, load, (failures or {}).get(number)
        )
        measured.append(found)
        usable += [] if records is None else [records]
    evidence = _evidence(directory, measured, usable, target, spec, load, restarted)
    spans = [phases.steady for phases in evidence.phases if isinstance(phases, Phases)]
    has_steady = bool(usable) and len(spans) == len(usable)
    device: DeviceKind = "gpu" if target.gpu_count else "worker"
    return Cell(
        topology=target.topology,
        load=load,
        device=device,
        device_count=target.gpu_count or target.worker_count,
        trials_asked=spec.trials,
        trials=tuple(measured),
        figures=Figures.over([trial.measured for trial in usable]) if usable else None,
        steady=Figures.over([trial.measured for trial in usable], spans) if has_steady else None,
        validity=judge(evidence) if usable else None,
        pictures=_pictures([directory / trial.directory for trial in measured if trial.figures], usable),
        handoffs=None if evidence.handoffs is None else {name: dict(one) for name, one in evidence.handoffs.items()},
    )


def _measure_trial(
    directory: Path, number: int, spec: LoadSpec, load: Load, failure: str | None
) -> tuple[Trial, TrialRecords | None]:
    path = directory / RECORDS_FILE
    records = TrialRecords((), ())
    try:
        records = read_trial(path) if path.exists() else records
    except ValueError:  # as a disk leaves it that filled while aiperf wrote: what there is of it is no trial
        failure = failure or f"aiperf's records break off within a line of {path}"
    failure = _why_unusable(records.measured, load, failure)
    errors = most_common_errors(records.measured)
    if failure is not None:
        return Trial(number, "failed", directory.name, None, None, errors, failure), None
    figures = Figures.over([records.measured])
    phases = phases_of(records.measured, spec.held_concurrency(load))
    steady = Figures.over([records.measured], [phases.steady]) if isinstance(phases, Phases) else None
    return Trial(number, _status(figures), directory.name, figures, steady, errors, None), records


def _evidence(
    directory: Path,
    measured: Sequence[Trial],
    usable: Sequence[TrialRecords],
    target: Target,
    spec: LoadSpec,
    load: Load,
    restarted: tuple[str, ...] | None,
) -> Evidence:
    directories = [directory / trial.directory for trial in measured if trial.figures]
    logs = [trial / "logs" / "aiperf.log" for trial in directories]
    delays: dict[str, tuple[float, ...]] = {}
    for log in logs:
        for service, found in event_loop_delays_ms(log.read_text(encoding="utf-8") if log.exists() else "").items():
            delays[service] = (*delays.get(service, ()), *found)
    gpus, requests = _read_of_server(directories, usable)
    return Evidence(
        trials=tuple(usable),
        concurrency=spec.held_concurrency(load),
        model=target.model,
        input_length=_input_length(spec, load),
        output_length=_output_length(spec, load),
        has_images=spec.image_batch_size > 0,
        prompts=spec.sharing,
        restarted=restarted,
        requests_by_worker=requests,
        handoffs=_handoffs(directories, usable),
        routes_by_prefix=target.routes_by_prefix,
        gpus=() if target.gpu_count == 0 else gpus,  # none to be throttled or shared
        cpu=cores.over_trials(
            [
                cpu_over(read_readings(directory) or (), _measured_part(records))
                for directory, records in zip(directories, usable, strict=True)
            ]
        ),
        event_loop_delays_ms=delays if all(log.exists() for log in logs) else None,
    )


def _pictures(trials: Sequence[Path], usable: Sequence[TrialRecords]) -> dict[str, PictureCounts] | None:
    return over_trials(
        [
            pictures_over(read_readings(directory) or (), _measured_part(records))
            for directory, records in zip(trials, usable, strict=True)
        ]
    )


def _handoffs(trials: Sequence[Path], usable: Sequence[TrialRecords]) -> dict[str, dict[str, HandoffCounts]] | None:
    return handoffs.over_trials(
        [
            handoffs_over(read_readings(directory) or (), _measured_part(records))
            for directory, records in zip(trials, usable, strict=True)
        ]
    )


def _measured_part(records: TrialRecords) -> Span:
    return Span(min(one.start_ns for one in records.measured), max(one.end_ns for one in records.measured))


def _read_of_server(
    trials: Sequence[Path], usable: Sequence[TrialRecords]
) -> tuple[tuple[GpuReading, ...] | None, dict[str, dict[str, int]] | None]:
    """GPUs and requests by worker over what was measured, of all trials; None where one of them does not tell."""
    gpus, counts = [], []
    for directory, records in zip(trials, usable, strict=True):
        readings = read_readings(directory) or ()
        measured = _measured_part(records)
        gpus.append(gpus_over(readings, measured))
        answered = sum(record.succeeded for record in records.measured)
        counts.append(requests_over(readings, measured, answered))
    known_gpus, known = [one for one in gpus if one is not None], [one for one in counts if one is not None]
    return (
        tuple(gpu for of_trial in known_gpus for gpu in of_trial) if len(known_gpus) == len(gpus) > 0 else None,
        summed(known) if len(known) == len(counts) > 0 else None,
    )


def _input_length(spec: LoadSpec, load: Load) -> AskedLength | None:
    """None for a dataset's, and for turns: their prompts have the turns before them too, however many those are."""
    if load.isl is None or spec.has_sessions:
        return None
    # aiperf 0.13.0 makes room for the template's tokens of one message, and a system prompt is one of its own.
    slack = _SYSTEM_MESSAGE_TOKENS if spec.shared_system_prompt_length else 0.0
    return AskedLength(load.isl, spec.isl_stddev, slack)


def _output_length(spec: LoadSpec, load: Load) -> AskedLength | None:
    """None where answers end by themselves, or records of a dataset ask for lengths of their own."""
    if load.osl is None or spec.dataset is not None or not spec.ignore_eos:
        return None
    return AskedLength(load.osl, spec.osl_stddev)


def _why_unusable(records: Sequence[RequestRecord], load: Load, failure: str | None) -> str | None:
    """None where every measured request has its record, also when ``failure`` says that aiperf ended badly over it.

    aiperf 0.13.0 exits 1 and writes no result when all requests failed. That is the server's failure, not aiperf's.
    """
    if len(records) == load.request_count and (failure is None or not any(record.succeeded for record in records)):
        return None
    return failure or f"aiperf left records of {len(records)} of {load.request_count} measured requests"


def _status(measured: Figures) -> TrialStatus:
    return "errors" if measured[error_request_count] else "uncounted" if measured[uncounted_request_count] else "ok"


def read_cell(run_dir: Path, name: str) -> Cell:
    """One cell of a run. Or UsageError: file and field."""
    return CELL.read(run_dir / "cells" / name, Cell)


def read_cells(run_dir: Path) -> tuple[Cell, ...]:
    """The finished cells of a run, by topology and rising load. Or UsageError: file and field."""
    cells: dict[str, tuple[Path, Cell]] = {}
    for path in sorted((run_dir / "cells").glob(f"*/{CELL.file}")):
        cell = CELL.read(path.parent, Cell)
        if cell.name in cells:  # as a copied directory has it: one of the two would be shown, and nobody told which
            raise UsageError(
                f"{cells[cell.name][0]} and {path} are both of the cell {quoted(cell.name)}; expected one; move the "
                f"other out of the run, or {RESTORE}"
            )
        cells[cell.name] = path, cell
    return tuple(sorted((cell for _, cell in cells.values()), key=lambda cell: in_order(cell.topology, cell.load)))


def in_order(topology: str, load: Load) -> tuple[Any, ...]:
    """What cells are sorted by wherever they are listed."""
    return (topology, load.isl or 0, load.osl or 0, load.concurrency is None, load.intensity)

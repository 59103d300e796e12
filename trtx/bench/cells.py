"""A cell (sweep point): one load on one topology, with its trials, metrics, checks, and its file ``cell.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trtx.bench import cores, draft_counters, draft_metrics, gpu_metrics, handoffs  # noqa: F401  # CELL has their metrics
from trtx.bench.documents import RESTORE, DocumentKind, plain
from trtx.bench.draft_counters import DraftCounts
from trtx.bench.failures import Reasons, merge_reasons
from trtx.bench.gpu_use import GpuPart, PricedGpus, reasons_over
from trtx.bench.handoffs import HandoffCounts
from trtx.bench.image_counters import ImageCounts, over_trials
from trtx.bench.judge.evidence import AskedLength, Evidence, event_loop_delays_ms
from trtx.bench.judge.validity import Validity, judge
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.metric_types import FIRST_SCHEMA, Figures, Metric, PerDevice, all_figures, latest_schema
from trtx.bench.metrics import error_request_count, most_common_errors, uncounted_request_count
from trtx.bench.phases import Phases, Span, phases_of
from trtx.bench.readings import (
    GpuReading,
    cpu_over,
    gpus_over,
    handoffs_over,
    images_over,
    read_readings,
    requests_over,
    summed,
)
from trtx.bench.records import RECORDS_FILE, RequestRecord, TrialRecords, read_trial
from trtx.bench.sent_dataset import asks_formats
from trtx.config.wording import quoted
from trtx.errors import UsageError

CELL = DocumentKind(
    "cell.json",
    version=latest_schema(),
    oldest=FIRST_SCHEMA,
    since="a cell was a mode at a concurrency, without a steady part and a validity",
)

# Trial status. ok: every request succeeded. uncounted: every request succeeded, but answers lack usage, so metrics are
# missing. errors: some requests failed. failed: aiperf left no usable records. A cell has the status of its worst
# trial; incomplete: it has fewer trials than requested.
TrialStatus = Literal["ok", "uncounted", "errors", "failed"]
CellStatus = TrialStatus | Literal["incomplete"]
_FROM_BAD: tuple[TrialStatus, ...] = ("failed", "errors", "uncounted")
_SYSTEM_MESSAGE_TOKENS = 16.0  # upper bound for template tokens around a system message (tiny model: 6, Qwen: 5)
_NOT_STEADY = ("a trial has no steady part",)
DeviceKind = Literal["gpu", "worker"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """One aiperf run of a cell. ``directory`` is relative to the cell's directory."""

    number: int  # from 1
    status: TrialStatus
    directory: str
    figures: Figures | None  # over all measured requests
    steady: Figures | None  # over the steady part alone; None if it has none
    errors: Reasons
    failure: str | None  # why there are no metrics


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of one load on one topology."""

    topology: str  # the topology's label
    load: Load
    device: DeviceKind  # the unit of "per device" metrics
    device_count: int | None  # None: unknown, so there are no per-device metrics
    trials_asked: int
    trials: tuple[Trial, ...]
    figures: Figures | None  # over all trials that have metrics
    steady: Figures | None  # over the steady parts; None if a trial has none
    validity: Validity | None  # None if there are no metrics
    pictures: dict[str, ImageCounts] | None = None  # by role, over all trials; None: no worker reported any
    # By decode and prefill worker, over all trials; empty: the topology hands no KV cache over; None: no counters.
    handoffs: dict[str, dict[str, HandoffCounts]] | None = None
    gpu_hour_price: float | None = None  # from which the cost was computed
    gpu_reasons: tuple[str, ...] = ()  # why metrics of GPUs over the steady parts are not known, one clause each
    drafts: DraftCounts | None = None  # over all trials; None: the topology doesn't speculate, or no counters

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
        """The reasons for failed requests, over all trials, most frequent first."""
        return merge_reasons(trial.errors for trial in self.trials)

    def value(self, metric: Metric[T]) -> T | None:
        """The value of a metric over all trials; None if it can't be computed."""
        return None if self.figures is None else metric.read(self.figures, self.device_count)

    def to_json(self) -> dict[str, Any]:
        """The JSON document of the cell, including derived values, which other programs can then read directly."""
        return {
            "name": self.name,
            "status": self.status,
            **plain(self),
            **{metric.name: self.value(metric) for metric in all_figures() if isinstance(metric, PerDevice)},
        }


def cell_name(topology: str, load: Load) -> str:
    """The cell's name. ``topology`` "" names a load alone, independent of what serves it."""
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
    """Reads aiperf's files in ``directory``/trial-NN for each of ``trials`` and computes the metrics.

    ``failures`` maps a trial number to the reason why aiperf ended without a result. ``restarted`` names the processes
    of the topology that were restarted during the cell (None: the topology was not supervised).
    """
    measured: list[Trial] = []
    usable: list[TrialRecords] = []
    gpus: list[_GpuParts] = []
    for number in trials:
        found, records, parts = _measure_trial(
            trial_directory(directory, number), number, target, spec, load, (failures or {}).get(number)
        )
        measured.append(found)
        usable += [] if records is None else [records]
        gpus += [] if parts is None else [parts]
    evidence = _evidence(directory, measured, usable, target, spec, load, restarted)
    spans = [phases.steady for phases in evidence.phases if isinstance(phases, Phases)]
    has_steady = bool(usable) and len(spans) == len(usable)
    requests = [trial.measured for trial in usable]
    steady = [parts.steady for parts in gpus if parts.steady is not None]
    device: DeviceKind = "gpu" if target.gpu_count else "worker"
    return Cell(
        topology=target.topology,
        load=load,
        device=device,
        device_count=target.gpu_count or target.worker_count,
        trials_asked=spec.trials,
        trials=tuple(measured),
        figures=Figures.over(requests, None, [parts.whole for parts in gpus]) if usable else None,
        steady=Figures.over(requests, spans, steady) if has_steady else None,
        validity=judge(evidence) if usable else None,
        pictures=_pictures([directory / trial.directory for trial in measured if trial.figures], usable),
        handoffs=None if evidence.handoffs is None else {name: dict(one) for name, one in evidence.handoffs.items()},
        gpu_hour_price=target.gpu_hour_price,
        gpu_reasons=reasons_over(steady) if has_steady else _NOT_STEADY if usable else (),
        drafts=draft_counters.over_trials([parts.whole.drafts for parts in gpus]),
    )


@dataclass(frozen=True, slots=True)
class _GpuParts:
    """The parts of one trial, for metrics of GPUs."""

    whole: GpuPart
    steady: GpuPart | None  # None: the trial has no steady part


def _measure_trial(
    directory: Path, number: int, target: Target, spec: LoadSpec, load: Load, failure: str | None
) -> tuple[Trial, TrialRecords | None, _GpuParts | None]:
    path = directory / RECORDS_FILE
    records = TrialRecords((), ())
    try:
        records = read_trial(path) if path.exists() else records
    except ValueError:  # the disk filled while aiperf wrote; a partial file is not a trial
        failure = failure or f"aiperf's records end in the middle of a line of {path}"
    failure = _why_unusable(records.measured, load, failure)
    errors = most_common_errors(records.measured)
    if failure is not None:
        return Trial(number, "failed", directory.name, None, None, errors, failure), None, None
    phases = phases_of(records.measured, spec.held_concurrency(load))
    span = phases.steady if isinstance(phases, Phases) else None
    readings, gpus = read_readings(directory) or (), PricedGpus(target.gpu_count, target.gpu_hour_price)
    whole = GpuPart.of_trial(records.measured, readings, gpus)
    part = None if span is None else GpuPart.of_span(records.measured, span, readings, gpus)
    figures = Figures.over([records.measured], None, [whole])
    steady = None if span is None or part is None else Figures.over([records.measured], [span], [part])
    trial = Trial(number, _status(figures), directory.name, figures, steady, errors, None)
    return trial, records, _GpuParts(whole, part)


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
        asks_formats=asks_formats(spec),
        prompts=spec.sharing,
        restarted=restarted,
        requests_by_worker=requests,
        handoffs=_handoffs(directories, usable),
        routes_by_prefix=target.routes_by_prefix,
        gpus=() if target.gpu_count == 0 else gpus,  # without GPUs there is no throttling or sharing to check
        cpu=cores.over_trials(
            [
                cpu_over(read_readings(directory) or (), _measured_part(records))
                for directory, records in zip(directories, usable, strict=True)
            ]
        ),
        event_loop_delays_ms=delays if all(log.exists() for log in logs) else None,
    )


def _pictures(trials: Sequence[Path], usable: Sequence[TrialRecords]) -> dict[str, ImageCounts] | None:
    return over_trials(
        [
            images_over(read_readings(directory) or (), _measured_part(records))
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
    """GPU readings and requests per worker over the measured parts of all trials; None for a value that a trial
    lacks.
    """
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
    """The requested input length, or None for datasets and multi-turn sessions.

    A later turn's prompt also contains the turns before it, whose number varies.
    """
    if load.isl is None or spec.has_sessions:
        return None
    # aiperf 0.13.0 reserves template tokens for one message only, and a system prompt is a second message.
    slack = _SYSTEM_MESSAGE_TOKENS if spec.shared_system_prompt_length else 0.0
    return AskedLength(load.isl, spec.isl_stddev, slack)


def _output_length(spec: LoadSpec, load: Load) -> AskedLength | None:
    """The requested output length, or None if the model may stop by itself or dataset records set their own lengths."""
    if load.osl is None or spec.dataset is not None or not spec.ignore_eos:
        return None
    return AskedLength(load.osl, spec.osl_stddev)


def _why_unusable(records: Sequence[RequestRecord], load: Load, failure: str | None) -> str | None:
    """The reason why a trial is unusable; None if every measured request has a record, whatever ``failure`` says.

    aiperf 0.13.0 exits 1 and writes no result when all requests failed. That is a failure of the server, not of aiperf.
    """
    if len(records) == load.request_count and (failure is None or not any(record.succeeded for record in records)):
        return None
    return failure or f"aiperf left records of {len(records)} of {load.request_count} measured requests"


def _status(measured: Figures) -> TrialStatus:
    return "errors" if measured[error_request_count] else "uncounted" if measured[uncounted_request_count] else "ok"


def read_cell(run_dir: Path, name: str) -> Cell:
    """Reads one cell of a run. Raises UsageError that names the file and the field."""
    return CELL.read(run_dir / "cells" / name, Cell)


def read_cells(run_dir: Path) -> tuple[Cell, ...]:
    """The finished cells of a run, sorted by topology and rising load. Raises UsageError that names the file and the
    field.
    """
    cells: dict[str, tuple[Path, Cell]] = {}
    for path in sorted((run_dir / "cells").glob(f"*/{CELL.file}")):
        cell = CELL.read(path.parent, Cell)
        if cell.name in cells:  # for example in a copied directory: only one of the two would be shown, without a hint
            raise UsageError(
                f"{cells[cell.name][0]} and {path} both contain the cell {quoted(cell.name)}; expected one file; move "
                f"the other out of the run, or {RESTORE}"
            )
        cells[cell.name] = path, cell
    return tuple(sorted((cell for _, cell in cells.values()), key=lambda cell: in_order(cell.topology, cell.load)))


def in_order(topology: str, load: Load) -> tuple[Any, ...]:
    """The sort key for every list of cells."""
    return (topology, load.isl or 0, load.osl or 0, load.concurrency is None, load.intensity)

"""Explains where a cell's time went, from the files of its trials: stages, the largest parts, and causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trtx.bench.cells import Cell, cell_directory
from trtx.bench.judge.causes import Bound, SlowCause, SlowEvidence, causes_in, device_wait, milliseconds
from trtx.bench.judge.checks import percent
from trtx.bench.phases import Span
from trtx.bench.readings import GpuReading, gpus_over, read_readings
from trtx.bench.records import RECORDS_FILE, read_trial
from trtx.bench.stage_rows import StageRow, WorkerUse, read_rows
from trtx.bench.stages import (
    DECODE,
    HANDOFF,
    PREFILL,
    QUEUE,
    RequestSplit,
    SplitPercentile,
    at_percentile,
    split_requests,
)

PERCENTILES = (50, 99)
NO_STAGES = "this run has no stage times: it was measured by an earlier trtx, or workers that don't report them"
_LEAST_COVERED = 0.9  # share of the answered requests whose split must be known
_DEVICE_BOUND = 0.7  # share of its time that an engine waits for its device, from which the device is the bound


@dataclass(frozen=True, slots=True)
class LargestStage:
    """The largest part of a latency: one sentence, and what bounds the part if the evidence shows it."""

    sentence: str  # without a full stop
    bound: Bound | None


@dataclass(frozen=True, slots=True)
class NamedCause:
    """A cause that the cell shows, with its evidence."""

    cause: SlowCause
    evidence: str

    @property
    def sentence(self) -> str:
        return f"{self.cause.name}: {self.cause.sentence} ({self.evidence}); {self.cause.advice}"


@dataclass(frozen=True, slots=True)
class CellExplanation:
    """Where the time of one cell went."""

    cell: str
    answered: int  # measured requests that succeeded
    splits: tuple[RequestSplit, ...]  # of those with a known split
    ttft: tuple[SplitPercentile, ...] = ()  # at PERCENTILES
    itl: tuple[SplitPercentile, ...] = ()
    parts: tuple[LargestStage, ...] = ()
    causes: tuple[NamedCause, ...] = ()
    unknown: str | None = None  # why there is no split

    @property
    def has_stages(self) -> bool:
        return self.unknown is None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The explanation in sentences without a full stop: the largest parts, then the causes."""
        if self.unknown is not None:
            return (self.unknown,)
        return (*(part.sentence for part in self.parts), *(cause.sentence for cause in self.causes))


def explain_cell(run_dir: Path, cell: Cell) -> CellExplanation:
    """Explains one cell of a run. Raises UsageError for a file that can't be read."""
    splits: list[RequestSplit] = []
    uses: list[WorkerUse] = []
    gpus: list[GpuReading] | None = []
    answered, has_rows = 0, False
    for trial in cell.trials:
        directory = cell_directory(run_dir, cell.name) / trial.directory
        if trial.figures is None or not (directory / RECORDS_FILE).exists():
            continue
        measured = read_trial(directory / RECORDS_FILE).measured
        answered += sum(record.succeeded for record in measured)
        span = Span(min(one.start_ns for one in measured), max(one.end_ns for one in measured))
        found = gpus_over(read_readings(directory) or (), span)
        gpus = None if gpus is None or found is None else [*gpus, *found]
        if (rows := read_rows(directory)) is None:
            continue
        has_rows = True
        splits += split_requests(measured, rows.requests)
        uses += [use for use in rows.uses if span.start_ns <= use.at_ns <= span.end_ns]
    if not has_rows:
        return CellExplanation(cell.name, answered, (), unknown=NO_STAGES)
    return explain(cell.name, answered, splits, None if gpus is None else tuple(gpus), uses)


def explain(
    name: str,
    answered: int,
    splits: Sequence[RequestSplit],
    gpus: tuple[GpuReading, ...] | None,
    uses: Sequence[WorkerUse],
) -> CellExplanation:
    """Explains a cell by its requests. ``answered``: the number of its measured requests that succeeded."""
    known = tuple(split for split in splits if split.ttft is not None)
    if len(known) < _LEAST_COVERED * answered or not known:
        why = f"the stages of only {len(known)} of {answered} answered requests are known, so they explain nothing"
        return CellExplanation(name, answered, known, unknown=why)
    ttft, itl = _percentiles(known)
    of_ttft, of_itl = next(iter(ttft), None), next(iter(itl), None)
    evidence = SlowEvidence(splits=known, ttft=of_ttft, itl=of_itl, gpus=gpus, uses=tuple(uses))
    parts = tuple(
        _largest(metric, split, evidence)
        for metric, splits_of in (("TTFT", ttft), ("ITL", itl))
        for split in splits_of[:1]
    )
    causes = tuple(NamedCause(cause, text) for cause, text in causes_in(evidence))
    return CellExplanation(name, answered, known, ttft, itl, parts, causes)


def _percentiles(
    splits: Sequence[RequestSplit],
) -> tuple[tuple[SplitPercentile, ...], tuple[SplitPercentile, ...]]:
    def of(values: list[tuple[float | None, Mapping[str, float] | None]]) -> tuple[SplitPercentile, ...]:
        known = [(value, stages) for value, stages in values if value is not None and stages is not None]
        return tuple(found for q in PERCENTILES if (found := at_percentile(known, q)) is not None)

    return (
        of([(split.record.time_to_first_token, split.ttft) for split in splits]),
        of([(split.record.inter_token_latency, split.itl) for split in splits]),
    )


def _largest(metric: str, split: SplitPercentile, evidence: SlowEvidence) -> LargestStage:
    stage = split.largest
    took = split.stages[stage]
    bound, because = _bound(metric, stage, evidence)
    limit = "" if bound is None else f", bound by {_BOUNDS[bound]} ({because})"
    whole = f"{metric} p{split.percentile} {milliseconds(split.value)}"
    share = percent(split.share(stage))
    return LargestStage(f"the largest part of {whole} is {stage} with {milliseconds(took)} ({share}){limit}", bound)


_BOUNDS: Mapping[Bound, str] = {
    "compute": "the GPU's matmuls",
    "memory": "the GPU's memory",
    "host": "the host",
    "queue": "the queue",
    "network": "the network",
}


def _bound(metric: str, stage: str, evidence: SlowEvidence) -> tuple[Bound | None, str]:
    """What bounds a stage, and the evidence; None if no recorded evidence shows it."""
    rows = evidence.rows
    if stage == QUEUE:
        return "queue", "requests waited for a slot or for KV blocks"
    if stage == HANDOFF and metric == "ITL":  # in TTFT, the handoff passes on the first token and reads no KV
        return "network", f"reading the KV took {milliseconds(1e3 * median(row.read_s for row in rows if row.read_s))}"
    if stage == DECODE and (share := device_wait(rows)) is not None:
        return _device_bound(
            "memory", share, evidence
        ), f"the engine waited for its device in {percent(share)} of the steps"
    if stage == PREFILL and (share := _prefill_wait(rows)) is not None:
        return _device_bound(
            "compute", share, evidence
        ), f"the engine waited for its device in {percent(share)} of the time"
    return None, ""


def _device_bound(of_gpu: Bound, share: float, evidence: SlowEvidence) -> Bound | None:
    """What bounds an engine that waited for its device in ``share`` of the time."""
    if share < 1 - _DEVICE_BOUND:
        return "host"
    has_gpu = evidence.gpus is None or len(evidence.gpus) > 0
    return of_gpu if has_gpu and share >= _DEVICE_BOUND else None


def _prefill_wait(rows: Sequence[StageRow]) -> float | None:
    known = [row for row in rows if row.prefill_s and row.prefill_wait_s is not None]
    total = sum(row.prefill_s or 0.0 for row in known)
    return sum(row.prefill_wait_s or 0.0 for row in known) / total if total else None

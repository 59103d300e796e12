"""A run directory as one value with rows, conditions and notes, from which all renderers start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from trtx.bench import (
    Cell,
    Distribution,
    Figures,
    Load,
    Metric,
    Reasons,
    Trial,
    cell_name,
    describe,
    read_journal,
)
from trtx.bench.cells import CellStatus, DeviceKind, in_order
from trtx.bench.explain import CellExplanation
from trtx.bench.files import name_of
from trtx.bench.intact import Kept, KeptDocuments, read_kept, read_kept_documents, with_records
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.sample import DEVICES, MetricColumn
from trtx.bench.judge.validity import Validity
from trtx.bench.metrics import (
    error_request_count,
    input_sequence_lengths,
    request_count,
    uncounted_request_count,
)
from trtx.report.conditions import (
    NOT_KNOWN,
    Condition,
    conditions_of,
    counted_tokens,
    deterministic_text,
    engine_text,
    swept_model,
    with_counts,
)
from trtx.report.journal_notes import notes_of
from trtx.report.scores import Scores, read_scores
from trtx.runs.forms import (
    COMPARISON,
    LOCK,
    PLAN,
    VERDICT,
    AskedRun,
    ComparedArms,
    Environment,
    Planned,
    PlannedTopology,
    RunVerdict,
)
from trtx.stats.intervals import Interval, mean_interval

RowStatus = CellStatus | Literal["missing"]
Part = Literal["whole", "steady"]  # the part of each trial that a metric covers
T = TypeVar("T")
_TITLED = 4  # maximum number of topologies in a title
# A prompt is cut from text and put into the chat template; token merges at the seams change its length by one or two.
# The share is aiperf 0.13.0's threshold for a difference between its count and the server's (USAGE_PCT_DIFF_THRESHOLD).
_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE = 2, 0.1  # tokens, and share of the requested length


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a cell, or a planned cell that was not measured."""

    topology: str  # label
    load: Load
    cell: Cell | None
    isl_is_fixed: bool = False  # all prompts have the same requested length
    kept: Kept = field(default_factory=Kept)  # state of the files from which the cell is computed
    device: DeviceKind = "worker"  # device kind of the run's per-device metrics; a cell with another kind has none

    @property
    def name(self) -> str:
        return cell_name(self.topology, self.load)

    @property
    def load_text(self) -> str:
        """The load's label without lengths, which have their own column."""
        return self.load.label.partition("-")[0]

    @property
    def lengths_text(self) -> str:
        """Requested input and output length such as ``64/16``."""
        return "/".join("–" if one is None else str(one) for one in (self.load.isl, self.load.osl))

    @property
    def status(self) -> RowStatus:
        return "missing" if self.cell is None else self.cell.status

    @property
    def figures(self) -> Figures | None:
        return None if self.cell is None else self.cell.figures

    @property
    def validity(self) -> Validity | None:
        """The validity that the run recorded, with the check of the records on disk; None without metrics."""
        validity = None if self.cell is None else self.cell.validity
        return None if validity is None else with_records(validity, self.kept)

    @property
    def level(self) -> ValidityLevel | None:
        return None if self.validity is None else self.validity.level

    @property
    def can_be_best(self) -> bool:
        """Whether the row may be called best: failed requests relieve the others, and an INVALID cell measured
        something else.
        """
        return self.status == "ok" and self.level is not ValidityLevel.INVALID

    def value(self, metric: Metric[T], part: Part = "whole") -> T | None:
        """The value of a metric, given by its record."""
        if self.cell is None or (figures := _part_of(self.cell, part)) is None:
            return None
        return metric.read(figures, self._device_count)

    def supports(self, metric: MetricColumn, part: Part = "whole") -> bool:
        """Whether there are enough requests to state the metric, or there is no value to state."""
        figures = None if self.cell is None else _part_of(self.cell, part)
        count = metric.count(figures, self._device_count)
        return count >= metric.samples_needed or metric.of(figures, self._device_count) is None

    def interval(self, metric: Metric[T], column: int | None, part: Part = "whole") -> Interval | None:
        """Student's interval of one number of a metric over trials; None for a single trial, or if a trial lacks the
        number.

        A percentile of a trial with too few requests counts as missing, because it is effectively the maximum.
        """
        if self.cell is None:
            return None
        values = [_trial_number(trial, metric, column, part, self._device_count) for trial in self.cell.trials]
        known = [value for value in values if value is not None]
        return mean_interval(known) if len(known) == len(values) else None

    @property
    def _device_count(self) -> int | None:
        return self.cell.device_count if self.cell is not None and self.cell.device == self.device else None

    @property
    def problem(self) -> str | None:
        """One sentence about the row's problems, if there are any."""
        if self.cell is None:
            return "not measured: the run ended before it"
        if self.cell.failure is not None:
            return self.cell.failure
        failed = f"{self.failed_text}: {describe(self.failures)}" if self.failed_text else None
        return "; ".join(text for text in (failed, *self.other_problems) if text) or None

    @property
    def other_problems(self) -> tuple[str, ...]:
        """Problems other than failed requests, one sentence each."""
        return tuple(text for text in (self.incomplete_text, self.uncounted_text, self.isl_text) if text)

    @property
    def incomplete_text(self) -> str | None:
        """The number of trials, if it is lower than requested."""
        if self.cell is None or len(self.cell.trials) >= self.cell.trials_asked:
            return None
        count, asked = len(self.cell.trials), self.cell.trials_asked
        return f"{count} of {asked} trials measured; trtx bench --resume measures the rest"

    @property
    def failures(self) -> Reasons:
        """Failure reasons of a measured cell's requests, most frequent first."""
        return self.cell.errors if self.cell is not None and self.figures is not None else ()

    @property
    def failed_text(self) -> str | None:
        """The number of failed requests, if there are any."""
        if self.figures is None or not (failed := self.figures[error_request_count]):
            return None
        return f"{failed:,} of {failed + self.figures[request_count]:,} failed"

    @property
    def uncounted_text(self) -> str | None:
        """The number of answers without a usage, if there are any."""
        if self.figures is None or not (uncounted := self.figures[uncounted_request_count]):
            return None
        answers = self.figures[request_count]
        return (
            f"{uncounted:,} of {answers:,} answers carry no usage, so metrics that need token counts can't be computed"
        )

    @property
    def isl_text(self) -> str | None:
        """The range of prompt lengths, if it deviates from the request, e.g. after truncation or with a long chat
        template.
        """
        counted = self.value(input_sequence_lengths)
        asked = self.load.isl
        if counted is None or asked is None or not self.isl_is_fixed:
            return None
        tolerated = max(_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE * asked)
        if max(asked - counted.min, counted.max - asked) <= tolerated:
            return None
        return f"the server counted prompts of {counted_tokens(counted)} tokens; {asked:,} were requested"


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, prepared for display."""

    name: str  # of the directory
    model: str
    rows: tuple[Row, ...]
    device: str  # divisor of per-device metrics
    conditions: tuple[Condition, ...]
    topologies: tuple[tuple[str, str], ...]  # label, and what served it
    notes: tuple[str, ...]  # the most important facts next to the metrics, such as restarts or an early end
    started_at: datetime | None
    subtitle: str  # engine and machine in short
    deterministic: str = ""  # "yes" if all topologies are deterministic, else the names of those that are
    verdict: RunVerdict | None = None  # None: the run ended early and was not judged
    arms: ComparedArms | None = None  # of an A/B run
    scores: Scores | None = None  # None: no scoring
    has_images: bool = False  # the load has images
    documents: KeptDocuments = field(default_factory=KeptDocuments)  # state of the files outside the cells
    explanations: tuple[CellExplanation, ...] = ()  # of cells with stage times

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the topologies, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row.topology for row in self.rows))

    @property
    def labels_text(self) -> str:
        """The labels as text for a title."""
        *others, last = self.labels or ("nothing",)
        if len(others) >= _TITLED:
            return f"{len(self.labels)} topologies"
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def has_several_lengths(self) -> bool:
        return len(self.length_pairs) > 1

    def series(self, row: Row) -> str:
        """The series of a row: its topology, and its lengths if there are several."""
        return f"{row.topology} {row.lengths_text}" if self.has_several_lengths else row.topology

    @property
    def length_pairs(self) -> tuple[tuple[int | None, int | None], ...]:
        """ISL and OSL of the loads; curves with different lengths aren't comparable."""
        return tuple(dict.fromkeys((row.load.isl, row.load.osl) for row in self.rows))

    @property
    def trials(self) -> int:
        """Maximum number of trials of a cell."""
        return max((len(row.cell.trials) for row in self.rows if row.cell), default=0)

    @property
    def all_series(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.series, self.rows)))

    @property
    def intensity(self) -> str:
        """What sets the load's intensity: the request rate, the concurrency or a trace."""
        if any(row.load.request_rate for row in self.rows):
            return "request rate"
        return "concurrency" if any(row.load.concurrency for row in self.rows) else "the trace's own times"

    @property
    def requests_sent(self) -> int:
        return sum(row.value(request_count) or 0 for row in self.rows) + self.requests_failed

    @property
    def requests_failed(self) -> int:
        return sum(row.value(error_request_count) or 0 for row in self.rows)

    @property
    def answers_uncounted(self) -> int:
        return sum(row.value(uncounted_request_count) or 0 for row in self.rows)

    @property
    def changed_rows(self) -> tuple[Row, ...]:
        """Rows whose metrics don't match the records on disk."""
        return tuple(row for row in self.rows if row.kept.problems)

    @property
    def other_problems(self) -> tuple[tuple[str, tuple[Row, ...]], ...]:
        """Problems other than failed requests: each sentence with the rows it applies to."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            for text in row.other_problems if row.figures is not None else filter(None, (row.problem,)):
                found.setdefault(text, []).append(row)
        return tuple((text, tuple(rows)) for text, rows in found.items())

    @property
    def is_clean(self) -> bool:
        """Whether there were no problems; reasons for SUSPECT are shown separately."""
        is_bad = self.verdict is not None and self.verdict.exit_code
        rows = bool(self.rows) and all(row.can_be_best and not row.problem for row in self.rows)
        return rows and not self.notes and not is_bad


def read_run(run_dir: Path) -> RunView:
    """Reads cells, journal, ``run.lock.yaml`` and ``plan.json``; data of missing files is left out.

    Raises UsageError, naming the field, for a truncated or foreign file.
    """
    asked = LOCK.find(run_dir, AskedRun)
    planned = PLAN.find(run_dir, Planned)
    environment = asked.provenance.environment if asked else None
    journal = read_journal(run_dir)
    found = read_kept(run_dir)
    cells = tuple(cell for cell, _ in found.values())
    plans = planned.topologies if planned else {}
    plan = next(iter(plans.values()), None)
    attach = asked.attach if asked else None
    scores = read_scores(run_dir, asked.topologies) if asked and asked.eval else None
    documents = read_kept_documents(run_dir)
    model = plan.model if plan else (attach.model if attach else None) or swept_model(journal)
    return RunView(
        name=name_of(run_dir),
        model=model or NOT_KNOWN,
        rows=_rows(asked, cells, {name: kept for name, (_, kept) in found.items()}),
        device=DEVICES[_device_of(cells)],
        conditions=conditions_of(asked, plans, journal, cells, scores),
        topologies=tuple((label, _topology(entry)) for label, entry in plans.items()),
        notes=(*documents.notes, *notes_of(journal), *(scores.notes if scores else ())),
        started_at=environment.started_at if environment else None,
        deterministic=deterministic_text(plans),
        subtitle=", ".join(part for part in (engine_text(plan, asked), _machine(environment, asked)) if part),
        verdict=VERDICT.find(run_dir, RunVerdict),
        arms=COMPARISON.find(run_dir, ComparedArms),
        scores=scores,
        has_images=asked is not None and asked.load.image_batch_size > 0,
        documents=documents,
    )


def _part_of(measured: Cell | Trial, part: Part) -> Figures | None:
    return measured.figures if part == "whole" else measured.steady


def _trial_number(
    trial: Trial, metric: Metric[T], column: int | None, part: Part, device_count: int | None
) -> float | None:
    figures = _part_of(trial, part)
    value = None if figures is None else metric.read(figures, device_count)
    if value is None or (column is not None and isinstance(value, Distribution) and not value.supports(column)):
        return None
    return metric.number(value, column)


def _rows(asked: AskedRun | None, cells: tuple[Cell, ...], kept: Mapping[str, Kept]) -> tuple[Row, ...]:
    measured = {(cell.topology, cell.load): cell for cell in cells}
    keys, is_fixed = set(measured), False
    if asked is not None:
        keys |= {(topology, load) for topology in asked.topologies for load in asked.load.cells}
        is_fixed = not asked.load.isl_stddev and asked.load.session_turns_mean == 1
        is_fixed = is_fixed and not asked.load.image_batch_size  # image tokens are not part of the request
    rows = (Row(*key, measured.get(key), is_fixed) for key in sorted(keys, key=lambda key: in_order(*key)))
    device = _device_of(cells)
    return tuple(replace(row, kept=kept.get(row.name, row.kept), device=device) for row in rows)


def _device_of(cells: Iterable[Cell]) -> DeviceKind:
    """Device kind of a run's per-device metrics: GPUs if a cell has a GPU count."""
    return "gpu" if any(cell.device == "gpu" for cell in cells) else "worker"


def _machine(environment: Environment | None, asked: AskedRun | None) -> str:
    if environment is None:
        return ""
    if asked is not None and asked.attach is not None:  # this machine ran only the client
        deployment = environment.deployment
        return ", ".join(with_counts(deployment.gpu_names or ())) if deployment is not None else ""
    gpus = with_counts([gpu.name for gpu in environment.gpus])
    return ", ".join(gpus) or f"{environment.cpu}, {environment.cpu_cores} cores"


def _topology(plan: PlannedTopology) -> str:
    parts = []
    for role in ("encode", "agg", "prefill", "decode"):
        workers = [process for process in plan.processes if process.role == role]
        if workers:
            gpus = sorted({index for worker in workers for index in worker.gpu_indices})
            on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
            parts.append(f"{len(workers)} {role} worker{'s' if len(workers) > 1 else ''}{on}")
    return " + ".join(parts) + (", deterministic" if plan.is_deterministic else "")

"""A run directory as one value: rows, conditions, notes. Everything that renders starts from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from trtx.bench import Cell, Figure, Figures, Load, Range, Reasons, cell_name, describe, read_cells, read_journal
from trtx.bench.cells import CellStatus, in_order
from trtx.bench.journal import Event, RunFailed, RunResumed, SweepStarted, TopologyReady, TopologyStopping
from trtx.bench.metrics import (
    error_request_count,
    input_sequence_lengths,
    output_sequence_lengths,
    request_count,
    uncounted_request_count,
)
from trtx.report.forms import (
    ENVIRONMENT,
    LOCK,
    PLAN,
    AskedLoad,
    AskedRun,
    Deployment,
    Environment,
    Planned,
    PlannedTopology,
)

RowStatus = CellStatus | Literal["missing"]
T = TypeVar("T")
NOT_KNOWN = "not known"
_ENDED_EARLY = "The run ended early"
# A prompt is cut from text, and the chat template put around it: merges at the seams make it a token or two longer or
# shorter. The share: aiperf 0.13.0's own, from which on its count and the server's disagree (USAGE_PCT_DIFF_THRESHOLD).
_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE = 2, 0.1  # tokens, of what was asked


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a cell, or the place of one that was never measured."""

    topology: str  # its label
    load: Load
    cell: Cell | None
    isl_is_fixed: bool = False  # every prompt was asked to be as long

    @property
    def name(self) -> str:
        return cell_name(self.topology, self.load)

    @property
    def status(self) -> RowStatus:
        return "missing" if self.cell is None else self.cell.status

    @property
    def figures(self) -> Figures | None:
        return None if self.cell is None else self.cell.figures

    def value(self, figure: Figure[T]) -> T | None:
        """A figure, by its record."""
        return None if self.cell is None else self.cell.value(figure)

    @property
    def problem(self) -> str | None:
        """One sentence, when something is wrong with this row."""
        if self.cell is None:
            return "not measured: the run ended before it"
        if self.cell.failure is not None:
            return self.cell.failure
        failed = f"{self.failed_text}: {describe(self.failures)}" if self.failed_text else None
        return "; ".join(text for text in (failed, self.uncounted_text, self.isl_text) if text) or None

    @property
    def failures(self) -> Reasons:
        """Why requests of a measured cell failed, most frequent first."""
        return self.cell.errors if self.cell is not None and self.figures is not None else ()

    @property
    def failed_text(self) -> str | None:
        """How many requests failed, when some did."""
        if self.figures is None or not (failed := self.figures[error_request_count]):
            return None
        return f"{failed:,} of {failed + self.figures[request_count]:,} failed"

    @property
    def uncounted_text(self) -> str | None:
        """How many answers nobody counted the tokens of, when some were such."""
        if self.figures is None or not (uncounted := self.figures[uncounted_request_count]):
            return None
        answers = self.figures[request_count]
        return f"{uncounted:,} of {answers:,} answers carry no usage: what takes tokens can't be computed"

    @property
    def isl_text(self) -> str | None:
        """How long prompts were, when one was not about as long as asked: truncated, or mostly a chat template."""
        counted = self.value(input_sequence_lengths)
        asked = self.load.isl
        if counted is None or asked is None or not self.isl_is_fixed:
            return None
        tolerated = max(_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE * asked)
        if max(asked - counted.min, counted.max - asked) <= tolerated:
            return None
        return f"the server counted prompts of {_counted_tokens(counted)} tokens, {asked:,} were asked"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that the figures depend on."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, ready to be shown."""

    name: str  # of the directory
    model: str
    rows: tuple[Row, ...]
    device: Literal["GPU", "worker"]  # what tokens/s is divided by
    conditions: tuple[Condition, ...]
    topologies: tuple[tuple[str, str], ...]  # label, what served it
    notes: tuple[str, ...]  # restarts, an early end: whatever a reader must know beside the figures
    started_at: datetime | None
    subtitle: str  # engine and machine, short

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the topologies."""
        return tuple(dict.fromkeys(row.topology for row in self.rows))

    @property
    def has_several_lengths(self) -> bool:
        return len({(row.load.isl, row.load.osl) for row in self.rows}) > 1

    def series(self, row: Row) -> str:
        """What a row is a point of: its topology, and its lengths where there are several."""
        return (
            f"{row.topology} {row.load.isl or '–'}/{row.load.osl or '–'}" if self.has_several_lengths else row.topology
        )

    @property
    def all_series(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.series, self.rows)))

    @property
    def intensity(self) -> str:
        """What loads differ by beside their lengths."""
        return "request rate" if any(row.load.request_rate for row in self.rows) else "concurrency"

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
    def is_clean(self) -> bool:
        return bool(self.rows) and all(row.status == "ok" and not row.problem for row in self.rows) and not self.notes


def read_run(run_dir: Path) -> RunView:
    """Reads cells, journal, ``run.lock.yaml``, ``plan.json``, ``env.json``; what a missing one knew is left out.

    Raises UsageError for one that was cut short or is another's, naming the field that it can't read.
    """
    asked = LOCK.find(run_dir, AskedRun)
    planned = PLAN.find(run_dir, Planned)
    environment = ENVIRONMENT.find(run_dir, Environment)
    journal = read_journal(run_dir)
    cells = read_cells(run_dir)
    plans = planned.topologies if planned else {}
    plan = next(iter(plans.values()), None)
    attach = asked.attach if asked else None
    model = plan.model if plan else (attach.model if attach else None) or _swept_model(journal)
    return RunView(
        name=run_dir.resolve().name,
        model=model or NOT_KNOWN,
        rows=_rows(asked, cells),
        device="GPU" if any(cell.device == "gpu" for cell in cells) else "worker",
        conditions=_conditions(asked, plan, environment, journal, cells),
        topologies=tuple((label, _topology(entry)) for label, entry in plans.items()),
        notes=_notes(journal),
        started_at=environment.started_at if environment else None,
        subtitle=", ".join(part for part in (_engine(plan, asked), _machine(environment, asked)) if part),
    )


def _rows(asked: AskedRun | None, cells: tuple[Cell, ...]) -> tuple[Row, ...]:
    measured = {(cell.topology, cell.load): cell for cell in cells}
    keys, is_fixed = set(measured), False
    if asked is not None:
        keys |= {(topology, load) for topology in asked.topologies for load in asked.load.cells}
        is_fixed = not asked.load.isl_stddev and asked.load.session_turns_mean == 1
    return tuple(Row(*key, measured.get(key), is_fixed) for key in sorted(keys, key=lambda key: in_order(*key)))


def _conditions(
    asked: AskedRun | None,
    plan: PlannedTopology | None,
    machine: Environment | None,
    journal: tuple[Event, ...],
    measured: tuple[Cell, ...],
) -> tuple[Condition, ...]:
    load = asked and asked.load
    of = "Client's " if asked and asked.attach else ""  # where the load was made, which is not where it was served
    found = [
        ("Command", machine and machine.command),
        ("Model", plan.model if plan else _swept_model(journal)),
        ("Engine", _engine(plan, asked)),
        ("GPUs", plan and (", ".join(_counted(plan.gpu_names)) or "none")),
        *(_of_deployment(machine.deployment) if machine else ()),
        (f"{of}GPU driver", machine and machine.gpu_driver),
        (f"{of}CPU", machine and f"{machine.cpu}, {machine.cpu_cores} cores"),
        (f"{of}Memory", machine and f"{machine.memory_bytes / 2**30:.0f} GiB"),
        (f"{of}Load average before", machine and machine.load_average),
        ("ISL / OSL", load and _lengths(load, measured)),
        ("Prompts", load and load.prompts),
        ("Requests", load and ", ".join(f"{cell.request_count} at {cell.asked}" for cell in load.cells)),
        ("Warm-up", load and ", ".join(f"{cell.warmup_request_count} at {cell.asked}" for cell in load.cells)),
        ("Trials", load and load.trials),
        ("Seed", load and load.seed),
        ("Streaming", load and ("yes" if load.streaming else "no")),
        ("Started", machine and machine.started_at.isoformat(timespec="seconds")),
        ("Resumed", _resumptions(journal)),
        ("Commit", machine and machine.commit),
        (f"{of}Versions", machine and _versions(machine.versions)),
        (f"{of}Python", machine and machine.python),
        (f"{of}Platform", machine and machine.platform),
        ("Time to load", ", ".join(f"{one.topology} {one.load_seconds:.1f} s" for one in _of(TopologyReady, journal))),
    ]
    return tuple(Condition(name, str(value)) for name, value in found if value not in (None, ""))


def _of_deployment(told: Deployment | None) -> list[tuple[str, str]]:
    """What an attached run knows of the other side, and that it does not know the rest."""
    if told is None:
        return []
    workers, gpus = told.workers, told.gpu_names
    named = gpus and ", ".join(_counted(gpus))
    return [
        ("Server", " ".join(part for part in (told.server, told.server_version) if part) or NOT_KNOWN),
        ("Server's engine", told.engine or NOT_KNOWN),
        ("Server's versions", _versions(told.versions) if told.versions else NOT_KNOWN),
        ("Server's workers", " + ".join(f"{workers[role]} {role}" for role in workers) if workers else NOT_KNOWN),
        ("Server's GPUs", named or _gpu_count(told.gpu_count)),
        ("API key", "asked for and sent" if told.api_key_from else "none asked for"),
    ]


def _gpu_count(count: int | None) -> str:
    return NOT_KNOWN if count is None else f"{count}, of a kind {NOT_KNOWN}" if count else "none"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _lengths(load: AskedLoad, cells: tuple[Cell, ...]) -> str:
    """Both lengths that were asked, each with what the server counted of it."""
    said = []
    for isl, osl in dict.fromkeys((one.isl, one.osl) for one in load.cells):
        of_pair = [cell for cell in cells if (cell.load.isl, cell.load.osl) == (isl, osl)]
        before = _length(isl, load.isl_stddev, [cell.value(input_sequence_lengths) for cell in of_pair])
        after = _length(osl, load.osl_stddev, [cell.value(output_sequence_lengths) for cell in of_pair])
        most = "" if load.ignore_eos or osl is None else "at most "
        said.append(f"{before} / {most}{after} tokens{' a turn' if load.session_turns_mean > 1 else ''}")
    return "; ".join(said)


def _length(asked: int | None, stddev: float, counted: list[Range | None]) -> str:
    """A number asked, "exact" only where every answer of every cell was counted and is so long."""
    if asked is None:
        asked_text = "what the dataset"
    elif stddev:
        asked_text = f"{asked} ± {stddev:g}"
    else:
        asked_text = str(asked)
    known = [found for found in counted if found is not None]
    if not known or len(known) < len(counted):
        return f"{asked_text} asked"
    over_all = Range(min(found.min for found in known), max(found.max for found in known))
    if asked is not None and over_all == Range(asked, asked):
        return f"{asked} exact"
    return f"{asked_text} asked ({_counted_tokens(over_all)} counted)"


def _counted_tokens(counted: Range) -> str:
    least, most = f"{counted.min:,.0f}", f"{counted.max:,.0f}"
    return least if least == most else f"{least} to {most}"


def _engine(plan: PlannedTopology | None, asked: AskedRun | None) -> str:
    if plan is not None:
        return f"{plan.engine} engine"
    return f"attached to {asked.attach.url}" if asked and asked.attach else ""


def _machine(environment: Environment | None, asked: AskedRun | None) -> str:
    if environment is None:
        return ""
    if asked is not None and asked.attach is not None:  # this machine made the load alone
        told = environment.deployment
        return ", ".join(_counted(told.gpu_names or ())) if told is not None else ""
    gpus = _counted([gpu.name for gpu in environment.gpus])
    return ", ".join(gpus) or f"{environment.cpu}, {environment.cpu_cores} cores"


def _topology(plan: PlannedTopology) -> str:
    parts = []
    for role in ("agg", "prefill", "decode"):
        workers = [process for process in plan.processes if process.role == role]
        if workers:
            gpus = sorted({index for worker in workers for index in worker.gpu_indices})
            on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
            parts.append(f"{len(workers)} {role} worker{'s' if len(workers) > 1 else ''}{on}")
    return " + ".join(parts)


def _notes(journal: tuple[Event, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    for event in journal:
        if isinstance(event, TopologyStopping) and event.restarts:
            deaths = ", ".join(f"{restart.name} ({restart.exit})" for restart in event.restarts)
            count = len(event.restarts)
            notes.append(
                f"{event.topology}: {count} restart{'s' if count > 1 else ''} while it was measured: {deaths}. "
                "Its figures include them."
            )
        if isinstance(event, RunResumed):
            notes = [note for note in notes if not note.startswith(_ENDED_EARLY)]
        if isinstance(event, RunFailed):
            notes.append(f"{_ENDED_EARLY}: {event.error}")
    return tuple(notes)


def _resumptions(journal: tuple[Event, ...]) -> str:
    """When a run that had ended early went on, and with which cells."""
    return "; ".join(
        f"{datetime.fromtimestamp(event.time, UTC).isoformat(timespec='seconds')} for "
        f"{', '.join(event.missing) or 'nothing'}"
        for event in _of(RunResumed, journal)
    )


def _swept_model(journal: tuple[Event, ...]) -> str | None:
    return next((event.model for event in _of(SweepStarted, journal)), None)


def _of(kind: type[T], journal: tuple[Event, ...]) -> tuple[T, ...]:
    return tuple(event for event in journal if isinstance(event, kind))


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)}× {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]

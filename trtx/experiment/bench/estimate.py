"""Estimates the duration of a sweep from earlier runs of the same model and engine; unknown without such runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trtx.bench import Load, cell_name, read_journal
from trtx.bench.journal import TopologyReady, TrialEnded, TrialStarted
from trtx.errors import UsageError
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.runs.forms import LOCK, PLAN, AskedRun, Planned
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """The conditions of a trial's duration: trials with equal ``Work`` are assumed to take equal times per request."""

    served: str  # engine and model, or the address of an attached deployment
    topology: str  # label
    concurrency: int | None
    request_rate: float | None
    isl: int | None
    osl: int | None
    prompts: str  # description of the prompts, except their lengths

    @property
    def topology_key(self) -> tuple[str, str]:
        return (self.served, self.topology)


@dataclass(frozen=True, slots=True)
class TrialDuration:
    """Duration of one trial of an earlier run. If the trial was repeated with a longer warm-up, both attempts count."""

    work: Work
    seconds: float  # from the first start to the last end, including aiperf's start and the creation of prompts
    requests: int  # planned number, measured and warm-up


@dataclass(frozen=True, slots=True)
class History:
    """Durations from earlier runs."""

    runs: int  # number of readable runs
    trials: tuple[TrialDuration, ...] = ()
    starts: tuple[tuple[tuple[str, str], float], ...] = ()  # topology (served, label) and seconds until ready


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell of a planned sweep."""

    name: str
    work: Work
    requests: int  # per trial, measured and warm-up
    trials: int
    starts: int  # starts of its topology, for all cells together


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated duration of the cells with data in earlier runs; seconds is None without any."""

    seconds: float | None
    cells: int  # number of cells of the sweep
    unknown: tuple[str, ...]  # names of cells without data
    runs: int  # number of readable earlier runs

    def sentence(self, parent: Path) -> str:
        """The estimate and its source, as text for users."""
        where = f"{parent}/"
        if self.seconds is None:
            if not self.runs:
                return f"not known: no earlier run in {where}"
            return f"not known: none of {self.runs} earlier runs in {where} measured such a cell"
        known = self.cells - len(self.unknown)
        cells = f"{known} of {self.cells} cells" if self.unknown else f"{known} cell{'s' if known > 1 else ''}"
        rest = f"; not known for {', '.join(self.unknown)}" if self.unknown else ""
        return f"about {_about(self.seconds)} for {cells}, as earlier runs in {where} took{rest}"


def _about(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def estimate(ahead: Sequence[PlannedCell], history: History) -> Estimate:
    """Estimates a sweep: the cells' requests times the median time per request, plus the topologies' start times. Pure.

    The medians are those of earlier trials with equal ``Work``, assumed to be from the same machine. They include a
    share of aiperf's start time, so a cell with many more requests than the earlier trials is overestimated.
    """
    by_work: dict[Work, list[float]] = {}
    for took in history.trials:
        if took.requests:
            by_work.setdefault(took.work, []).append(took.seconds / took.requests)
    seconds, unknown = 0.0, []
    topologies: dict[tuple[str, str], int] = {}  # number of starts per topology, for cells with data
    for cell in ahead:
        if cell.work not in by_work:
            unknown.append(cell.name)
            continue
        seconds += median(by_work[cell.work]) * cell.requests * cell.trials
        topologies[cell.work.topology_key] = cell.starts
    for topology, count in topologies.items():
        if took_to_start := [one for key, one in history.starts if key == topology]:
            seconds += median(took_to_start) * count
    return Estimate(seconds if len(unknown) < len(ahead) else None, len(ahead), tuple(unknown), history.runs)


def cells_ahead(spec: ExperimentSpec, plans: Iterable[tuple[str, Plan | None]]) -> tuple[PlannedCell, ...]:
    """The cells of a sweep on its topologies, given as pairs of label and plan (None: attached)."""
    url = None if spec.attach is None else spec.attach.url
    return tuple(
        PlannedCell(
            cell_name(label, load),
            _work(_served(plan, url), label, load, spec.load.description),
            load.request_count + load.warmup_request_count,
            spec.load.trials,
            spec.load.trials if spec.order == "abba" else 1,
        )
        for label, plan in plans
        for load in spec.load.loads
    )


def read_history(parent: Path) -> History:
    """The history of all runs in ``parent``. Unreadable runs, e.g. of an older version, are skipped."""
    runs = 0
    trials: list[TrialDuration] = []
    starts: list[tuple[tuple[str, str], float]] = []
    for lock in sorted(parent.glob(f"*/{LOCK.file}")):
        try:
            found = _of_run(lock.parent)
        except UsageError:
            continue
        runs += 1
        trials += found.trials
        starts += found.starts
    return History(runs, tuple(trials), tuple(starts))


def _of_run(run_dir: Path) -> History:
    asked, planned = LOCK.find(run_dir, AskedRun), PLAN.find(run_dir, Planned)
    if asked is None:
        return History(1)
    served = {label: f"{plan.engine} {plan.model}" for label, plan in (planned.topologies if planned else {}).items()}
    if asked.attach is not None:
        served = dict.fromkeys(asked.topologies, asked.attach.url)
    loads = {cell_name(label, load): (label, load) for label in served for load in asked.load.cells}
    began: dict[tuple[str, int], float] = {}
    ended: dict[tuple[str, int], float] = {}
    starts = []
    for event in read_journal(run_dir):
        if isinstance(event, TopologyReady) and event.topology in served:
            key = (served[event.topology], event.topology)
            starts.append((key, event.load_seconds + event.warm_up_seconds))
        elif isinstance(event, TrialStarted):
            began.setdefault((event.cell, event.trial), event.time)
        elif isinstance(event, TrialEnded):
            if event.aiperf_exit_code == 0:
                ended[event.cell, event.trial] = event.time
            else:  # aborted, so its full duration is unknown
                began.pop((event.cell, event.trial), None)
    trials = []
    for (cell, trial), end in ended.items():
        if cell in loads and (cell, trial) in began:
            label, load = loads[cell]
            work = _work(served[label], label, load, asked.load.prompts)
            requests = load.request_count + load.warmup_request_count
            trials.append(TrialDuration(work, end - began[cell, trial], requests))
    return History(1, tuple(trials), tuple(starts))


def _served(plan: Plan | None, url: str | None) -> str:
    return f"{plan.engine} {plan.model}" if plan is not None else url or ""


def _work(served: str, topology: str, load: Load, prompts: str) -> Work:
    return Work(served, topology, load.concurrency, load.request_rate, load.isl, load.osl, prompts)

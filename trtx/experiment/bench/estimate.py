"""How long a sweep will take, from what earlier runs of the same model and engine took; without them, not known."""

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
    """What takes its time: one load on one topology. Two that are equal take about as long a request."""

    served: str  # engine and model, or the address of what is attached
    topology: str  # its label
    concurrency: int | None
    request_rate: float | None
    isl: int | None
    osl: int | None
    prompts: str  # what is said of them beside their lengths

    @property
    def topology_key(self) -> tuple[str, str]:
        return (self.served, self.topology)


@dataclass(frozen=True, slots=True)
class Took:
    """One trial of an earlier run, made again with a longer warm-up or not."""

    work: Work
    seconds: float  # from its first start to its last end: aiperf's own start, and prompts that are made, included
    requests: int  # measured and warm-up, as they were planned


@dataclass(frozen=True, slots=True)
class History:
    """What earlier runs tell."""

    runs: int  # that could be read
    trials: tuple[Took, ...] = ()
    starts: tuple[tuple[tuple[str, str], float], ...] = ()  # of topologies (served, label): seconds until ready


@dataclass(frozen=True, slots=True)
class Ahead:
    """One cell of a sweep."""

    name: str
    work: Work
    requests: int  # of each trial, measured and warm-up
    trials: int
    starts: int  # of its topology, for all its cells


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that the cells take which earlier runs tell of; None: they tell of none."""

    seconds: float | None
    cells: int  # of the sweep
    unknown: tuple[str, ...]  # names of cells like which nothing was measured
    runs: int  # earlier ones that could be read

    def sentence(self, parent: Path) -> str:
        """For a person: what is known, and from what."""
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


def estimate(ahead: Sequence[Ahead], history: History) -> Estimate:
    """Sum over the cells of what a request of an equal load took (the median over trials), and of what each start
    of a topology took. Pure.

    It is as good as the machine is the same. aiperf's own start is shared out over the requests, so that many more of
    them are estimated too long.
    """
    by_work: dict[Work, list[float]] = {}
    for took in history.trials:
        if took.requests:
            by_work.setdefault(took.work, []).append(took.seconds / took.requests)
    seconds, unknown = 0.0, []
    topologies: dict[tuple[str, str], int] = {}  # of cells that are known, and how often each is started
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


def cells_ahead(spec: ExperimentSpec, plans: Iterable[tuple[str, Plan | None]]) -> tuple[Ahead, ...]:
    """The cells of a sweep on its topologies, each a label and its plan (None: attached)."""
    url = None if spec.attach is None else spec.attach.url
    return tuple(
        Ahead(
            cell_name(label, load),
            _work(_served(plan, url), label, load, spec.load.said),
            load.request_count + load.warmup_request_count,
            spec.load.trials,
            spec.load.trials if spec.order == "abba" else 1,
        )
        for label, plan in plans
        for load in spec.load.loads
    )


def read_history(parent: Path) -> History:
    """Of all runs in ``parent``; one that can't be read, as of an older version, is left out."""
    runs = 0
    trials: list[Took] = []
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
            else:  # broken off: how long it would have taken, nobody knows
                began.pop((event.cell, event.trial), None)
    trials = []
    for (cell, trial), end in ended.items():
        if cell in loads and (cell, trial) in began:
            label, load = loads[cell]
            work = _work(served[label], label, load, asked.load.prompts)
            requests = load.request_count + load.warmup_request_count
            trials.append(Took(work, end - began[cell, trial], requests))
    return History(1, tuple(trials), tuple(starts))


def _served(plan: Plan | None, url: str | None) -> str:
    return f"{plan.engine} {plan.model}" if plan is not None else url or ""


def _work(served: str, topology: str, load: Load, prompts: str) -> Work:
    return Work(served, topology, load.concurrency, load.request_rate, load.isl, load.osl, prompts)

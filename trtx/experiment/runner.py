"""The run itself: directory, topologies one after the other, and what is written whatever happens."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trtx.bench import (
    AiperfHost,
    Journal,
    Progress,
    ServerReading,
    Target,
    cell_name,
    check_endpoint,
    check_load,
    read_cells,
    sweep,
)
from trtx.bench.journal import (
    LoadStarted,
    ProcessRestart,
    RunEnded,
    RunFailed,
    RunResumed,
    TopologyReady,
    TopologyStopping,
)
from trtx.errors import LoadGeneratorError, TrtxError, UsageError
from trtx.experiment import ab, directory, gate, resumption
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.provenance import provenance_of
from trtx.experiment.schedule import Step, schedule
from trtx.experiment.server_readings import open_attached, open_topology
from trtx.experiment.spec import ExperimentSpec
from trtx.experiment.targets import attached_target, check_fits, target_of
from trtx.experiment.verdict import error_of
from trtx.launch import Event, Guardian, Interruption, ServedTopology, catch_signals, prepare, serve
from trtx.report import REPORT_FILE, render
from trtx.report.forms import BASELINE, CONDITIONS, LOCK, PLAN, VERDICT, RunVerdict
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class Listener:
    """What a run tells while it goes on. Called from this thread, and ``on_event`` from the supervisor's too."""

    on_start: Callable[[Path], None] = lambda run_dir: None
    on_cells: Callable[[tuple[str, ...], tuple[str, ...], int], None] = lambda kept, ahead, trials: None
    # names of the cells that hold and of those to measure, and in how many trials
    on_topology: Callable[[str], None] = lambda label: None
    on_event: Callable[[str, Event], None] = lambda label, event: None
    on_progress: Callable[[Progress], None] = lambda progress: None


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run. ``error`` is None, or says what was wrong and with which exit code to end."""

    run_dir: Path
    report: Path
    error: TrtxError | None
    baseline: Path | None = None  # that was made of it


@dataclass(slots=True, eq=False)
class _Run:
    """The run while it goes on."""

    spec: ExperimentSpec
    run_dir: Path
    listener: Listener
    missing: tuple[Step, ...]  # what is to be measured
    target: Target | None = None  # of an attached run
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once it was removed
    interruption: Interruption = field(default_factory=Interruption)
    plans: dict[str, Plan] = field(default_factory=dict)  # by topology, of those in ``missing``

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    @property
    def ahead(self) -> tuple[str, ...]:
        """Names of the cells to measure."""
        names = (cell_name(step.label, trial.load) for step in self.missing for trial in step.trials)
        return tuple(dict.fromkeys(names))


def run(spec: ExperimentSpec, *, parent: Path, argv: Sequence[str], listener: Listener | None = None) -> FinishedRun:
    """Serves and sweeps every topology in turn, or sweeps what ``spec.attach`` names, and renders the report.

    Every topology is planned before the first is started, so a mistake in the second costs nothing. When it ends
    early (a launch that failed, an interrupt), the error passes on, after what was measured has been rendered.
    """
    started_at = datetime.now(UTC)
    check_endpoint()
    check_load(spec.load)
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    target = attached_target(spec.attach, deployment) if spec.attach and deployment else None
    run_dir = directory.create(parent, spec, started_at)
    missing = schedule(spec)
    here = environment(argv, started_at, deployment)
    state = _Run(spec, run_dir, listener or Listener(), missing, target)
    try:
        with directory.told_if_unwritable(run_dir):
            _plan(state)
            _write_plans(state, {}, {})
            told = provenance_of(spec, here, state.plans, target)
            gate.prepare(run_dir, spec, state.plans, told)
            directory.write_lock(run_dir, spec, told)  # last: what has one can be resumed, and lacks nothing then
    except BaseException:
        _remove_if_untouched(run_dir)
        raise
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as state.check_directory:
        return _measure_missing(state)


def resume(run_dir: Path, *, argv: Sequence[str], listener: Listener | None = None) -> FinishedRun:
    """Goes on with a run that ended early: measures the cells that have no result, renders all.

    Raises UsageError, and leaves the run as it is, where another trtx is in it, or where machine, versions, model or
    configs are others than recorded: such cells would not compare.
    """
    check_endpoint()
    run_dir = run_dir.absolute()
    spec = directory.read_lock(run_dir)
    check_load(spec.load)
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as check_directory:
        recorded = resumption.read_recorded(run_dir, spec)
        resumption.check_conditions(recorded, environment(argv, datetime.now(UTC)))
        resumption.check_dataset(recorded)
        resumption.wait_for_the_end(recorded)
        missing = resumption.missing_steps(recorded)
        state = _Run(spec, run_dir, listener or Listener(), missing, check_directory=check_directory)
        if missing and spec.attach is not None:
            deployment = ask_deployment(spec.attach)
            resumption.check_deployment(recorded, deployment)
            state.target = attached_target(spec.attach, deployment)
        _plan(state)
        for mode, plan in state.plans.items():
            resumption.check_plan(recorded, mode, plan)
        state.journal.mend()
        resumption.clear_the_way(recorded, missing)
        _write_plans(state, recorded.plans, recorded.checkpoints)
        kept = tuple(cell.name for cell in read_cells(run_dir))
        state.journal.note(RunResumed(command=shlex.join(argv), kept=kept, missing=state.ahead))
        return _measure_missing(state)


def _measure_missing(state: _Run) -> FinishedRun:
    gate.forget(state.run_dir)
    state.listener.on_start(state.run_dir)
    kept = tuple(cell.name for cell in read_cells(state.run_dir))
    state.listener.on_cells(kept, state.ahead, sum(len(step.trials) for step in state.missing))
    with catch_signals(state.interruption), _rendered_whatever_happens(state), _aiperf_host(state) as host:
        for step in state.missing:
            state.listener.on_topology(step.label)
            if state.target is not None:
                with open_attached(state.target) as read:
                    _sweep(state, host, state.target, step, state.interruption.check, None, read)
            else:
                _measure(state, host, step)
    error = error_of(VERDICT.read(state.run_dir, RunVerdict))
    has_results = not isinstance(error, LoadGeneratorError)
    saved = gate.saved(state.run_dir, state.spec) if has_results else None
    return FinishedRun(state.run_dir, state.run_dir / REPORT_FILE, error, saved)


def _plan(state: _Run) -> None:
    if state.spec.attach is not None:
        return
    ahead = {step.label for step in state.missing}
    for topology in state.spec.topologies:
        if topology.label in ahead:
            plan = prepare(topology.spec, run_dir=state.run_dir / topology.label)
            check_fits(plan, state.spec.load)
            state.plans[topology.label] = plan


def _write_plans(state: _Run, plans: Mapping[str, Plan], checkpoints: Mapping[str, str]) -> None:
    """``plan.json``: the plans of this attempt over those of earlier ones."""
    if state.spec.attach is not None:
        return
    prints = {label: resumption.fingerprint(plan.model_path) for label, plan in state.plans.items()}
    topologies = {label: plan.to_json() for label, plan in {**plans, **state.plans}.items()}
    PLAN.write(state.run_dir, {"topologies": topologies, "checkpoints": {**checkpoints, **prints}})


@contextmanager
def _aiperf_host(state: _Run) -> Iterator[AiperfHost]:
    """aiperf, imported while the first topology starts, under a guardian: if this process is killed, it ends too."""
    with ExitStack() as cleanup:

        def guard(scratch: Path) -> Callable[[int], None]:
            guardian = Guardian(f"TMPDIR={scratch}", scratch)
            cleanup.callback(guardian.goodbye)

            def watch(session: int) -> None:
                guardian.watch(session)
                state.journal.note(LoadStarted(session=session, scratch=str(scratch)))

            return watch

        key = None if state.target is None else state.target.api_key
        with AiperfHost(state.run_dir / "aiperf" / "host.log", guard, api_key=key) as host:
            yield host


def _measure(state: _Run, host: AiperfHost, step: Step) -> None:
    plan, label = _plan_of(state, step), step.label
    with serve(
        plan, on_event=lambda event: state.listener.on_event(label, event), interruption=state.interruption
    ) as served:
        loaded, warmed_up = round(served.load_seconds, 3), round(served.warm_up_seconds, 3)
        state.journal.note(TopologyReady(topology=label, load_seconds=loaded, warm_up_seconds=warmed_up))
        try:
            names = partial(_restarted, served)
            with open_topology(plan) as read:
                _sweep(state, host, target_of(label, plan), step, served.check, names, read)
        finally:
            restarts = tuple(ProcessRestart(name=one.name, at=one.at, exit=one.exit) for one in served.restarts)
            state.journal.note(TopologyStopping(topology=label, restarts=restarts))


def _restarted(served: ServedTopology) -> tuple[str, ...]:
    return tuple(restart.name for restart in served.restarts)


def _plan_of(state: _Run, step: Step) -> Plan:
    """The plan that a topology was checked by; made anew, with a directory of its own, each further time that it is
    started: ports, and what a process writes, belong to one start."""
    directory = state.run_dir / step.label
    if not directory.exists():
        return state.plans[step.label]
    (spec,) = (topology.spec for topology in state.spec.topologies if topology.label == step.label)
    starts = len(list(directory.glob("start-*")))
    return prepare(spec, run_dir=directory / f"start-{starts + 2:02d}")


def _sweep(
    state: _Run,
    host: AiperfHost,
    target: Target,
    step: Step,
    still_serving: Callable[[], None],
    restarts: Callable[[], Sequence[str]] | None,
    read_server: Callable[[], ServerReading] | None,
) -> None:
    def still_there() -> None:
        still_serving()
        state.check_directory()

    sweep(
        host,
        target,
        state.spec.load,
        state.run_dir,
        trials=step.trials,
        on_progress=state.listener.on_progress,
        still_serving=still_there,
        restarts=restarts,
        read_server=read_server,
    )


@contextmanager
def _rendered_whatever_happens(state: _Run) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError, UsageError):  # what failed first is what is told
            state.check_directory()  # nothing is left to render
            state.journal.note(RunFailed(error=str(error) or type(error).__name__))
            ab.keep_comparison(state.run_dir, state.spec, None)
            render(state.run_dir)
        raise
    ab.keep_comparison(state.run_dir, state.spec, gate.judge(state.run_dir, state.spec))
    state.journal.note(RunEnded())
    render(state.run_dir)


def _remove_if_untouched(run_dir: Path) -> None:
    """Bad input leaves no run directory: nothing was started, so there is nothing to keep."""
    for document in (PLAN, LOCK, CONDITIONS, BASELINE):
        (run_dir / document.file).unlink(missing_ok=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()

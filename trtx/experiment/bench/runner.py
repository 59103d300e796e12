"""The run: creates the directory, measures one topology after the other, and always writes the results."""

from __future__ import annotations

import shlex
import shutil
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
    check_settings,
    read_cells,
    sweep,
)
from trtx.bench.intact import run_ended, run_failed
from trtx.bench.journal import (
    LoadStarted,
    RunResumed,
)
from trtx.errors import LoadGeneratorError, TrtxError, UsageError
from trtx.evals import Session, marker
from trtx.evals.gate import cell_of
from trtx.evals.messages import Progress as ScoringProgress
from trtx.experiment import directory, gate
from trtx.experiment.bench import ab, resumption
from trtx.experiment.bench.schedule import Step, schedule
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.bench.verdict import error_of
from trtx.experiment.deployment import ask_context_length, ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.left_out import refuse_equal, tell_left_out
from trtx.experiment.provenance import provenance_of
from trtx.experiment.scoring import SESSION_LOG, common_tokenizer, endpoint_of, is_scored, open_session, wait_loaded
from trtx.experiment.server_readings import open_attached, open_topology
from trtx.experiment.serving import serve_noted
from trtx.experiment.targets import attached_target, check_attached, check_fits, common_context_length, target_of
from trtx.launch import Event, Guardian, Interruption, ServedTopology, catch_signals, check_usual_client, prepare
from trtx.report import REPORT_FILE, render
from trtx.runs.forms import BASELINE, CONDITIONS, LOCK, PLAN, VERDICT, RunVerdict
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of a run. They are called from the run's thread; ``on_event`` also from the supervisor's."""

    on_start: Callable[[Path], None] = lambda run_dir: None
    on_cells: Callable[[tuple[str, ...], tuple[str, ...], int], None] = lambda kept, ahead, trials: None
    # names of cells and scores that are kept, names of those to measure, number of trials
    on_topology: Callable[[str], None] = lambda label: None
    on_event: Callable[[str, Event], None] = lambda label, event: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    # Loading tasks and datasets, which takes minutes if they are downloaded.
    on_loading: Callable[[Path], None] = lambda log: None
    on_loaded: Callable[[dict[str, int], tuple[str, ...]], None] = lambda samples, topologies: None
    on_scored: Callable[[ScoringProgress], None] = lambda progress: None  # after each sample
    # Changed files, for which trials are measured again.
    on_changed: Callable[[tuple[str, ...]], None] = lambda files: None
    on_told: Callable[[str], None] = lambda line: None  # a sentence about the request, before anything starts


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run. ``error`` is None, or gives the reason and the exit code."""

    run_dir: Path
    report: Path
    error: TrtxError | None
    baseline: Path | None = None  # the baseline saved from it
    unsaved: UsageError | None = None  # why a requested baseline was not saved; the run's own error takes precedence


@dataclass(slots=True, eq=False)
class _Run:
    """State of a run in progress."""

    spec: ExperimentSpec
    run_dir: Path
    listener: Listener
    missing: tuple[Step, ...]  # steps to measure and score
    target: Target | None = None  # of an attached run
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once the directory has been removed
    interruption: Interruption = field(default_factory=Interruption)
    plans: dict[str, Plan] = field(default_factory=dict)  # by topology, for those in ``missing``
    session: Session | None = None  # has loaded the tasks; None: no scoring

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    @property
    def ahead(self) -> tuple[str, ...]:
        """Names of the cells to measure and of the scores to determine."""
        names = (cell_name(step.label, trial.load) for step in self.missing for trial in step.trials)
        return (*dict.fromkeys(names), *map(_scores_of, self.to_score))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the cells and scores from an earlier attempt."""
        scored = (label for label in self.spec.labels if self.spec.eval and label not in self.to_score)
        return (
            *(cell.name for cell in read_cells(self.run_dir)),
            *(_scores_of(label) for label in scored if is_scored(self.run_dir, label)),
        )

    @property
    def to_score(self) -> tuple[str, ...]:
        """Labels of the topologies to score."""
        return tuple(step.label for step in self.missing if step.is_scored)

    def check(self) -> None:
        """Raises if the run has been interrupted or its directory is gone."""
        self.interruption.check()
        self.check_directory()


def run(spec: ExperimentSpec, *, parent: Path, argv: Sequence[str], listener: Listener | None = None) -> FinishedRun:
    """Serves and measures every topology in turn, or measures the deployment at ``spec.attach``, and renders the
    report.

    If ``spec.eval`` is set, each topology is scored too. All topologies are planned and all tasks are loaded before the
    first one starts, so that an error in the second is found immediately. If the run ends early (failed launch,
    interrupt), the error is re-raised after the results so far have been rendered.
    """
    started_at = datetime.now(UTC)
    check_endpoint()
    check_settings()
    check_load(spec.load)
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    target = attached_target(spec.attach, deployment) if spec.attach and deployment else None
    if deployment and target:
        check_attached(deployment, target, spec.load)
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
            # Written last: a directory with a manifest can be resumed, so everything else must exist.
            directory.write_lock(run_dir, spec, told)
    except BaseException:
        _remove_if_untouched(run_dir)
        raise
    with (
        directory.told_if_unwritable(run_dir), directory.hold(run_dir) as state.check_directory, ExitStack() as opened,
    ):  # fmt: skip
        try:
            opened.enter_context(_session(state))
        except UsageError:
            _remove_if_untouched(run_dir)
            raise
        return _measure_missing(state)


@directory.goes_on
def resume(run_dir: Path, *, argv: Sequence[str], listener: Listener | None = None) -> FinishedRun:
    """Continues a run that ended early: measures missing cells, requests missing samples, and renders everything.

    Raises UsageError, leaving the run unchanged, if another trtx uses the directory, or if machine, versions, model or
    configs differ from the recorded ones, because the cells wouldn't be comparable.
    """
    check_endpoint()
    check_settings()
    spec = directory.read_lock(run_dir)
    check_load(spec.load)
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as check_directory:
        recorded = resumption.read_recorded(run_dir, spec)
        resumption.check_conditions(recorded, environment(argv, datetime.now(UTC)))
        resumption.check_dataset(recorded)
        resumption.wait_for_the_end(recorded, [marker(run_dir / SESSION_LOG)])
        missing, changed = resumption.missing_steps(recorded), resumption.changed_files(recorded)
        state = _Run(spec, run_dir, listener or Listener(), missing, check_directory=check_directory)
        if missing and spec.attach is not None:
            deployment = ask_deployment(spec.attach)
            resumption.check_deployment(recorded, deployment)
            state.target = attached_target(spec.attach, deployment)
            check_attached(deployment, state.target, spec.load)
        _plan(state)
        for mode, plan in state.plans.items():
            resumption.check_plan(recorded, mode, plan)
        with _session(state):
            state.journal.mend()
            resumption.clear_the_way(recorded, missing)
            _write_plans(state, recorded.plans, recorded.checkpoints)
            state.journal.note(
                RunResumed(command=shlex.join(argv), kept=state.kept, missing=state.ahead, changed=changed)
            )
            if changed:
                state.listener.on_changed(changed)
            return _measure_missing(state)


def _measure_missing(state: _Run) -> FinishedRun:
    gate.forget(state.run_dir)
    state.listener.on_start(state.run_dir)
    state.listener.on_cells(state.kept, state.ahead, sum(len(step.trials) for step in state.missing))
    with catch_signals(state.interruption), _rendered_whatever_happens(state), ExitStack() as opened:
        has_trials = any(step.trials for step in state.missing)
        host = opened.enter_context(_aiperf_host(state)) if has_trials else None
        for step in state.missing:
            state.listener.on_topology(step.label)
            if state.target is not None:
                _measure_attached(state, host, step, state.target)
            else:
                _measure(state, host, step)
    error = error_of(VERDICT.read(state.run_dir, RunVerdict))
    has_results = not isinstance(error, LoadGeneratorError)
    saved, unsaved = None, None
    try:
        saved = gate.saved(state.run_dir, state.spec) if has_results else None
    except UsageError as failure:  # the run has ended with a verdict, which is reported all the same
        unsaved = failure
    return FinishedRun(state.run_dir, state.run_dir / REPORT_FILE, error, saved, unsaved)


def _plan(state: _Run) -> None:
    if state.spec.attach is not None:
        return
    ahead = {step.label for step in state.missing}
    for topology in state.spec.topologies:
        if topology.label in ahead:
            plan = prepare(topology.spec, run_dir=state.run_dir / topology.label)
            check_fits(plan, state.spec.load)
            check_usual_client(plan)
            state.plans[topology.label] = plan
    refuse_equal(state.spec, state.plans)
    tell_left_out(state.plans, state.listener.on_told)


def _write_plans(state: _Run, plans: Mapping[str, Plan], checkpoints: Mapping[str, str]) -> None:
    """Writes ``plan.json``: the plans of this attempt, and those of earlier ones that it doesn't replace."""
    if state.spec.attach is not None:
        return
    prints = {label: resumption.fingerprint(plan.model_path) for label, plan in state.plans.items()}
    topologies = {label: plan.to_json() for label, plan in {**plans, **state.plans}.items()}
    PLAN.write(state.run_dir, {"topologies": topologies, "checkpoints": {**checkpoints, **prints}})


@contextmanager
def _aiperf_host(state: _Run) -> Iterator[AiperfHost]:
    """Starts aiperf's imports, in parallel with the first topology, under a guardian that ends them if trtx is
    killed.
    """
    with ExitStack() as cleanup:

        def guard(scratch: Path) -> Callable[[int], None]:
            guardian = Guardian(f"TMPDIR={scratch}", scratch)
            cleanup.callback(guardian.goodbye)

            def watch(session: int) -> None:
                guardian.watch(session)
                state.journal.note(LoadStarted(session=session, scratch=str(scratch)))

            return watch

        key = None if state.target is None else state.target.api_key
        own = sorted({plan.certificate for plan in state.plans.values() if plan.certificate is not None})
        log = state.run_dir / "aiperf" / "host.log"
        with AiperfHost(log, guard, api_key=key, certificates=own) as host:
            yield host


@contextmanager
def _session(state: _Run) -> Iterator[None]:
    """Opens a session with all tasks and datasets loaded, if there is something to score.

    Its process waits while speed is measured. Raises UsageError for invalid tasks, before anything is served.
    """
    asked = state.spec.eval
    if asked is None or not state.to_score:
        yield
        return
    tokenizer = common_tokenizer(state.plans) if state.target is None else state.target.tokenizer_path
    attach, log = state.spec.attach, state.run_dir / SESSION_LOG
    context = common_context_length(state.plans) if attach is None else ask_context_length(ask_deployment(attach))
    with catch_signals(state.interruption), open_session(asked, tokenizer, context, log) as state.session:
        state.listener.on_loading(log)
        loaded = wait_loaded(asked, state.session, state.check)
        cells = gate.planned_loads(state.spec)
        if twice := [task for task in loaded.metrics for label in state.spec.labels if cell_of(label, task) in cells]:
            raise UsageError(
                f"task {twice[0]} is called as a load of this sweep, and a verdict names both alike; give the task "
                "another name"
            )
        state.listener.on_loaded(loaded.samples, state.to_score)
        yield


def _measure(state: _Run, host: AiperfHost | None, step: Step) -> None:
    plan, label = _plan_of(state, step), step.label
    with serve_noted(label, plan, state.journal, state.listener.on_event, state.interruption) as served:
        target = target_of(label, plan)
        if host is not None and step.trials:
            with open_topology(plan) as read:
                _sweep(state, host, target, step, served.check, partial(_restarted, served), read)
        if step.is_scored:
            _score(state, target, served.check)


def _measure_attached(state: _Run, host: AiperfHost | None, step: Step, target: Target) -> None:
    if host is not None and step.trials:
        with open_attached(target) as read:
            _sweep(state, host, target, step, state.interruption.check, None, read)
    if step.is_scored:
        _score(state, target, state.interruption.check)


def _score(state: _Run, target: Target, still_serving: Callable[[], None]) -> None:
    """Requests every sample that has no answer yet."""

    def check() -> None:
        still_serving()
        state.check_directory()

    if state.session is None:
        raise ValueError("nothing has read the tasks: see _session()")
    endpoint = endpoint_of(
        state.run_dir, target.topology, target.url, target.model, target.api_key, certificate=target.certificate
    )
    state.session.ask(endpoint, check, state.listener.on_scored)


def _restarted(served: ServedTopology) -> tuple[str, ...]:
    return tuple(restart.name for restart in served.restarts)


def _plan_of(state: _Run, step: Step) -> Plan:
    """The plan for a start of a topology.

    The first start uses the plan that was checked. Further starts get a new plan with its own directory, because ports
    and output files belong to one start.
    """
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
        with suppress(OSError, UsageError):  # the first failure is the one to report
            state.check_directory()  # if the directory is gone, there is nothing to render
            with suppress(OSError, UsageError):
                ab.keep_comparison(state.run_dir, state.spec, None)
            state.journal.note(run_failed(state.run_dir, error))
            render(state.run_dir)
        raise
    ab.keep_comparison(state.run_dir, state.spec, gate.judge(state.run_dir, state.spec))
    state.journal.note(run_ended(state.run_dir))
    render(state.run_dir)


def _scores_of(label: str) -> str:
    return f"scores of {label}"


def _remove_if_untouched(run_dir: Path) -> None:
    """Removes a run directory in which nothing was started, so that invalid input leaves none behind."""
    shutil.rmtree(run_dir / SESSION_LOG.parent, ignore_errors=True)
    for document in (PLAN, LOCK, CONDITIONS, BASELINE):
        (run_dir / document.file).unlink(missing_ok=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()

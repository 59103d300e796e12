"""The run of ``trtx bench``: measures one topology after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.bench import (
    AiperfHost,
    ServerReading,
    Target,
    cell_name,
    check_endpoint,
    check_load,
    check_settings,
    read_cells,
    sweep,
)
from trtx.bench.endpoint import KEPT_BODIES
from trtx.bench.journal import LoadStarted
from trtx.bench.sent_dataset import asks_formats
from trtx.errors import LoadGeneratorError, UsageError
from trtx.evals import Session, eval_directory
from trtx.evals.gate import cell_of
from trtx.experiment import directory, gate
from trtx.experiment.bench import ab, resumption
from trtx.experiment.bench.schedule import ScheduledStart, schedule
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.deployment import ask_context_length, ask_deployment
from trtx.experiment.left_out import refuse_equal, tell_left_out
from trtx.experiment.lifecycle import FinishedRun, OpenRun, new_run, resumed_run
from trtx.experiment.listener import RunListener
from trtx.experiment.load_fit import check_attached, check_fits
from trtx.experiment.provenance import provenance_of
from trtx.experiment.scoring import SESSION_LOG, common_tokenizer, endpoint_of, is_scored, open_session, wait_loaded
from trtx.experiment.server_readings import open_attached, open_topology
from trtx.experiment.targets import attached_target, common_context_length, target_of
from trtx.experiment.worker_rows import WorkerRowFiles, row_files_of
from trtx.launch import Guardian, catch_signals, check_usual_client
from trtx.report import render
from trtx.topology import Plan


@dataclass(slots=True, eq=False)
class _Sweep:
    """State of a run in progress."""

    run: OpenRun[ExperimentSpec]
    missing: tuple[ScheduledStart, ...]  # steps to measure and score
    target: Target | None = None  # of an attached run
    session: Session | None = None  # has loaded the tasks; None: no scoring

    @property
    def ahead(self) -> tuple[str, ...]:
        """Names of the cells to measure and of the scores to determine."""
        names = (cell_name(step.label, trial.load) for step in self.missing for trial in step.trials)
        return (*dict.fromkeys(names), *map(_scores_of, self.to_score))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the cells and scores from an earlier attempt."""
        spec, run_dir = self.run.spec, self.run.run_dir
        scored = (label for label in spec.labels if spec.eval and label not in self.to_score)
        return (
            *(cell.name for cell in read_cells(run_dir)),
            *(_scores_of(label) for label in scored if is_scored(run_dir, label)),
        )

    @property
    def to_score(self) -> tuple[str, ...]:
        """Labels of the topologies to score."""
        return tuple(step.label for step in self.missing if step.is_scored)


def run(spec: ExperimentSpec, *, parent: Path, argv: Sequence[str], listener: RunListener | None = None) -> FinishedRun:
    """Serves and measures every topology in turn, or measures the deployment at ``spec.attach``, and renders the
    report.

    If ``spec.eval`` is set, each topology is scored too. All topologies are planned and all tasks are loaded before the
    first one starts, so that an error in the second is found immediately. If the run ends early (failed launch,
    interrupt), the error is re-raised after the results so far have been rendered.
    """
    check_endpoint()
    check_settings()
    check_load(spec.load)
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    target = attached_target(spec.attach, deployment, spec.gpu_hour_price) if spec.attach and deployment else None
    if deployment and target:
        check_attached(deployment, target, spec.load)
    with new_run(spec, parent, argv, listener, deployment) as opened:
        state = _Sweep(opened, schedule(spec), target)
        _plan(state)
        opened.write_plans()
        provenance = provenance_of(spec, opened.environment, opened.plans, target)
        gate.prepare(opened.run_dir, spec, opened.plans, provenance)
        with opened.held(provenance), _session(state):
            return _measure_missing(state)


def resume(run_dir: Path, *, argv: Sequence[str], listener: RunListener | None = None) -> FinishedRun:
    """Continues a run that ended early: measures missing cells, requests missing samples, and renders everything.

    Raises UsageError, leaving the run unchanged, as :func:`resumed_run`, and if model, dataset or configs differ from
    the recorded ones, because the cells wouldn't be comparable.
    """
    check_endpoint()
    check_settings()
    with resumed_run(run_dir, directory.read_lock, argv, listener) as (opened, recorded):
        check_load(opened.spec.load)
        resumption.check_dataset(recorded)
        missing, changed = resumption.missing_steps(recorded), resumption.changed_files(recorded)
        state = _Sweep(opened, missing)
        if missing and opened.spec.attach is not None:
            deployment = opened.find_deployment(opened.spec.attach)
            state.target = attached_target(opened.spec.attach, deployment, opened.spec.gpu_hour_price)
            check_attached(deployment, state.target, opened.spec.load)
        _plan(state)
        with _session(state):
            opened.journal.mend()
            resumption.clear_the_way(recorded, missing)
            opened.go_on(kept=state.kept, missing=state.ahead, changed=changed)
            if changed:
                opened.listener.on_changed(changed)
            return _measure_missing(state)


def _measure_missing(state: _Sweep) -> FinishedRun:
    run, spec = state.run, state.run.spec

    def judge() -> None:
        ab.keep_comparison(run.run_dir, spec, gate.judge(run.run_dir, spec))

    def give_up() -> None:
        ab.keep_comparison(run.run_dir, spec, None)

    with run.measuring(judge, render, give_up), ExitStack() as opened:
        run.listener.on_cells(state.kept, state.ahead, sum(len(step.trials) for step in state.missing))
        has_trials = any(step.trials for step in state.missing)
        host = opened.enter_context(_aiperf_host(state)) if has_trials else None
        for step in state.missing:
            run.listener.on_topology(step.label, is_served=state.target is None)
            _measure(state, host, step)
    finished = run.finished()
    if isinstance(finished.error, LoadGeneratorError):  # there are no results
        return finished
    try:
        return replace(finished, baseline=gate.saved(run.run_dir, spec))
    except UsageError as failure:  # the run has ended with a verdict, which is reported all the same
        return replace(finished, unsaved=failure)


def _plan(state: _Sweep) -> None:
    run = state.run

    def check(plan: Plan) -> None:
        check_fits(plan, run.spec.load)
        check_usual_client(plan)

    run.plan({step.label for step in state.missing}, check)
    refuse_equal(run.spec, run.plans)
    tell_left_out(run.plans, run.listener.on_note)


@contextmanager
def _aiperf_host(state: _Sweep) -> Iterator[AiperfHost]:
    """Starts aiperf's imports, in parallel with the first topology, under a guardian that ends them if trtx is
    killed.
    """
    with ExitStack() as cleanup:

        def guard(scratch: Path) -> Callable[[int], None]:
            guardian = Guardian(f"TMPDIR={scratch}", scratch)
            cleanup.callback(guardian.goodbye)

            def watch(session: int) -> None:
                guardian.watch(session)
                state.run.journal.note(LoadStarted(session=session, scratch=str(scratch)))

            return watch

        key = None if state.target is None else state.target.api_key
        own = sorted({plan.certificate for plan in state.run.plans.values() if plan.certificate is not None})
        log = state.run.run_dir / "aiperf" / "host.log"
        kept = KEPT_BODIES if asks_formats(state.run.spec.load) else None
        with AiperfHost(log, guard, api_key=key, certificates=own, variables=kept) as host:
            yield host


@contextmanager
def _session(state: _Sweep) -> Iterator[None]:
    """Opens a session with all tasks and datasets loaded, if there is something to score.

    Its process waits while speed is measured. Raises UsageError for invalid tasks, before anything is served.
    """
    run, asked = state.run, state.run.spec.eval
    if asked is None or not state.to_score:
        yield
        return
    tokenizer = common_tokenizer(run.plans) if state.target is None else state.target.tokenizer_path
    attach, log = run.spec.attach, run.run_dir / SESSION_LOG
    context = common_context_length(run.plans) if attach is None else ask_context_length(ask_deployment(attach))
    with catch_signals(run.interruption), open_session(asked, tokenizer, context, log) as state.session:
        run.listener.on_loading(log)
        loaded = wait_loaded(asked, state.session, run.check)
        cells = gate.planned_loads(run.spec)
        if twice := [task for task in loaded.metrics for label in run.spec.labels if cell_of(label, task) in cells]:
            raise UsageError(
                f"the task {twice[0]} and a load of this sweep have the same name, so the verdict could not tell their "
                "cells apart; rename the task"
            )
        run.listener.on_loaded(loaded.samples, state.to_score)
        yield


def _measure(state: _Sweep, host: AiperfHost | None, step: ScheduledStart) -> None:
    run = state.run
    if state.target is not None:
        _measure_target(state, host, step, state.target, run.check, open_attached(state.target))
        return
    with run.serve(step.label) as served:

        def restarts() -> tuple[str, ...]:
            return tuple(restart.name for restart in served.restarts)

        target, check = target_of(step.label, served.plan, run.spec.gpu_hour_price), run.checking(served.check)
        with WorkerRowFiles(row_files_of(served.plan)) as rows:
            _measure_target(state, host, step, target, check, open_topology(served.plan), restarts, rows.take)


def _measure_target(
    state: _Sweep,
    host: AiperfHost | None,
    step: ScheduledStart,
    target: Target,
    check: Callable[[], None],
    reading: AbstractContextManager[Callable[[], ServerReading] | None],
    restarts: Callable[[], Sequence[str]] | None = None,
    take_rows: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Measures the step's trials, and then requests every sample that has no answer yet."""
    run = state.run
    if host is not None and step.trials:
        with reading as read_server:
            sweep(
                host,
                target,
                run.spec.load,
                run.run_dir,
                trials=step.trials,
                on_progress=run.listener.on_measured,
                still_serving=check,
                restarts=restarts,
                read_server=read_server,
                take_rows=take_rows,
            )
    if step.is_scored:
        assert state.session is not None
        home = eval_directory(run.run_dir, step.label)
        where = target.url, target.model, home, target.api_key, target.certificate
        endpoint = endpoint_of(target.topology, *where)
        state.session.ask(endpoint, check, run.listener.on_scored)


def _scores_of(label: str) -> str:
    return f"scores of {label}"

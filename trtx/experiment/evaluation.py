"""The run of ``trtx eval``: serves one topology after the other and requests its missing answers."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trtx.bench import Journal, Target
from trtx.bench.intact import run_ended, run_failed
from trtx.bench.journal import RunResumed
from trtx.errors import TrtxError, UsageError
from trtx.evals import Session, marker
from trtx.evals.messages import Progress
from trtx.experiment import directory
from trtx.experiment.bench import resumption
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.bench.verdict import error_of
from trtx.experiment.deployment import api_key, ask_context_length, ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.evaluation_spec import EvaluationSpec, read_evaluation
from trtx.experiment.evaluation_verdict import judge_evaluation, read_scored_baseline
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.provenance import provenance_with
from trtx.experiment.scoring import SESSION_LOG, common_tokenizer, endpoint_of, is_scored, open_session, wait_loaded
from trtx.experiment.serving import serve_noted
from trtx.experiment.targets import attached_target, common_context_length, target_of
from trtx.launch import Event, Interruption, catch_signals, prepare
from trtx.report import REPORT_FILE
from trtx.report.evaluation import render_evaluation
from trtx.runs.forms import CONDITIONS, LOCK, PLAN, VERDICT, AskedOf, Deployment, Provenance, RunVerdict
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class EvaluationListener:
    """Callbacks of a run. They are called from the run's thread; ``on_event`` also from the supervisor's."""

    # Loading tasks and datasets, which takes minutes if they are downloaded.
    on_loading: Callable[[Path], None] = lambda log: None
    on_start: Callable[[Path], None] = lambda run_dir: None
    on_loaded: Callable[[dict[str, int], tuple[str, ...]], None] = lambda samples, topologies: None
    on_topology: Callable[[str], None] = lambda label: None
    on_event: Callable[[str, Event], None] = lambda label, event: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_told: Callable[[str], None] = lambda line: None  # a sentence about the request, before anything starts


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """A finished run. ``error`` is None, or gives the reason and the exit code."""

    run_dir: Path
    report: Path
    error: TrtxError | None


@dataclass(slots=True, eq=False)
class _Evaluation:
    """State of a run in progress."""

    spec: EvaluationSpec
    run_dir: Path
    listener: EvaluationListener
    deployment: Deployment | None = None  # of an attached run
    tokenizer: Path | None = None
    interruption: Interruption = field(default_factory=Interruption)
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once the directory has been removed
    plans: dict[str, Plan] = field(default_factory=dict)  # by topology

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    def check(self) -> None:
        self.interruption.check()
        self.check_directory()


def evaluate(
    spec: EvaluationSpec, *, parent: Path, argv: Sequence[str], listener: EvaluationListener | None = None
) -> FinishedEvaluation:
    """Scores every topology in turn, or the deployment at ``spec.attach``.

    Tasks, datasets and plans are checked before the first topology starts. If the run ends early, the error is
    re-raised after the scores so far have been rendered.
    """
    started_at = datetime.now(UTC)
    if spec.baseline is not None:
        read_scored_baseline(Path(spec.baseline))
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    run_dir = directory.create(parent, spec, started_at)
    state = _Evaluation(spec, run_dir, listener or EvaluationListener(), deployment)
    here = environment(argv, started_at, deployment)
    try:
        with directory.told_if_unwritable(run_dir):
            target = _prepare(state)
            _write_plans(state)
            if spec.attach is not None and target is None:
                directory.write_lock(run_dir, spec, Provenance(here, {}))
            else:
                directory.write_lock(run_dir, spec, provenance_with(_no_calls, here, state.plans, target))
            with _session(state) as session, directory.hold(run_dir) as state.check_directory:
                return _score(state, session, spec.labels)
    except UsageError:
        _remove_if_nothing_served(run_dir)
        raise


@directory.goes_on
def resume_evaluation(
    run_dir: Path, *, argv: Sequence[str], listener: EvaluationListener | None = None
) -> FinishedEvaluation:
    """Continues a run that ended early: requests the missing samples, then judges and renders everything.

    Raises UsageError, leaving the run unchanged, if another trtx uses the directory, or if machine, versions, model or
    configs differ from the recorded ones.
    """
    spec = read_evaluation(run_dir)
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as check_directory:
        recorded = _read_recorded(run_dir, spec)
        resumption.check_conditions(recorded, environment(argv, datetime.now(UTC)))
        resumption.wait_for_the_end(recorded, [marker(run_dir / SESSION_LOG)])
        state = _Evaluation(spec, run_dir, listener or EvaluationListener(), check_directory=check_directory)
        left = tuple(label for label in spec.labels if not is_scored(run_dir, label))
        if spec.attach is not None and left:
            state.deployment = ask_deployment(spec.attach)
            resumption.check_deployment(recorded, state.deployment)
        _prepare(state, anew=True)
        for label, plan in state.plans.items():
            resumption.check_plan(recorded, label, plan)
        state.journal.mend()
        _write_plans(state)
        kept = tuple(label for label in spec.labels if label not in left)
        state.journal.note(RunResumed(command=shlex.join(argv), kept=kept, missing=left))
        (run_dir / VERDICT.file).unlink(missing_ok=True)
        if not left:
            with _rendered_whatever_happens(state):
                state.listener.on_start(run_dir)
            return _finished(state)
        with _session(state) as session:
            return _score(state, session, left)


def _read_recorded(run_dir: Path, spec: EvaluationSpec) -> resumption.Recorded[EvaluationSpec]:
    here = LOCK.read(run_dir, AskedOf).provenance.environment
    planned = (
        resumption.PlanDocument({}, {}) if spec.attach is not None else PLAN.read(run_dir, resumption.PlanDocument)
    )
    return resumption.Recorded(run_dir, spec, planned.topologies, planned.checkpoints, here, None)


def _no_calls(target: Target) -> dict[str, str]:
    return {}


def _prepare(state: _Evaluation, *, anew: bool = False) -> Target | None:
    """Plans every topology and finds the tokenizer. ``anew``: in new directories next to those of an earlier
    attempt.
    """
    for topology in state.spec.topologies:
        home = state.run_dir / topology.label
        if anew and home.exists():
            home = home / f"start-{len(list(home.glob('start-*'))) + 2:02d}"
        state.plans[topology.label] = prepare(topology.spec, run_dir=home)
    tell_left_out(state.plans, state.listener.on_told)
    if state.spec.attach is None:
        state.tokenizer = common_tokenizer(state.plans)
        return None
    if state.deployment is None:
        return None
    target = _attached(state.spec.attach, state.deployment)
    state.tokenizer = None if target is None else target.tokenizer_path
    return target


def _attached(attach: Attach, deployment: Deployment) -> Target | None:
    """The target; None if the model's tokenizer isn't available here and none was named, since generation needs
    none.
    """
    try:
        return attached_target(attach, deployment)
    except UsageError:
        if attach.tokenizer is not None:
            raise
        return None


def _write_plans(state: _Evaluation) -> None:
    if state.spec.attach is None:
        prints = {label: resumption.fingerprint(plan.model_path) for label, plan in state.plans.items()}
        plans = {label: plan.to_json() for label, plan in state.plans.items()}
        PLAN.write(state.run_dir, {"topologies": plans, "checkpoints": prints})


@contextmanager
def _session(state: _Evaluation) -> Iterator[Session]:
    """Runs lm-eval in its process, and handles signals from here on."""
    log, context = state.run_dir / SESSION_LOG, _context_length(state)
    with catch_signals(state.interruption), open_session(state.spec, state.tokenizer, context, log) as session:
        yield session


def _context_length(state: _Evaluation) -> int | None:
    """Maximum tokens of prompt and answer, over all topologies."""
    if state.deployment is not None:
        return ask_context_length(state.deployment)
    return common_context_length(state.plans)


def _score(state: _Evaluation, session: Session, labels: Sequence[str]) -> FinishedEvaluation:
    state.listener.on_loading(state.run_dir / SESSION_LOG)
    loaded = wait_loaded(state.spec, session, state.check)
    state.listener.on_start(state.run_dir)
    state.listener.on_loaded(loaded.samples, tuple(labels))
    with _rendered_whatever_happens(state):
        for label in labels:
            state.listener.on_topology(label)
            if label == ATTACHED:
                assert state.deployment is not None
                url, model = state.deployment.url, state.deployment.model
                endpoint = endpoint_of(state.run_dir, label, url, model, api_key(state.deployment))
                session.ask(endpoint, state.check, state.listener.on_progress)
            else:
                _serve_and_ask(state, session, label)
    return _finished(state)


def _finished(state: _Evaluation) -> FinishedEvaluation:
    error = error_of(VERDICT.read(state.run_dir, RunVerdict))
    return FinishedEvaluation(state.run_dir, state.run_dir / REPORT_FILE, error)


def _serve_and_ask(state: _Evaluation, session: Session, label: str) -> None:
    plan = state.plans[label]
    with serve_noted(label, plan, state.journal, state.listener.on_event, state.interruption) as served:

        def check() -> None:
            served.check()
            state.check_directory()

        target = target_of(label, plan)
        endpoint = endpoint_of(state.run_dir, label, target.url, target.model, certificate=target.certificate)
        session.ask(endpoint, check, state.listener.on_progress)


@contextmanager
def _rendered_whatever_happens(state: _Evaluation) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError, UsageError):  # the first failure is the one to report
            state.check_directory()  # if the directory is gone, there is nothing to render
            state.journal.note(run_failed(state.run_dir, error))
            render_evaluation(state.run_dir)
        raise
    judge_evaluation(state.run_dir, state.spec)
    state.journal.note(run_ended(state.run_dir))
    render_evaluation(state.run_dir)


def _remove_if_nothing_served(run_dir: Path) -> None:
    """Removes a run directory without results, so that invalid input leaves none behind."""
    if (run_dir / "journal.jsonl").exists() or not run_dir.is_dir():
        return
    for document in (PLAN, LOCK, CONDITIONS):
        (run_dir / document.file).unlink(missing_ok=True)
    shutil.rmtree(run_dir / SESSION_LOG.parent, ignore_errors=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()

"""The run of ``trtx eval``: serves one topology after the other and requests its missing answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from trtx.bench import Target
from trtx.errors import UsageError
from trtx.evals import Session, eval_directory
from trtx.experiment.bench.spec import Attach
from trtx.experiment.deployment import ask_context_length, ask_deployment
from trtx.experiment.evaluation_spec import EvaluationSpec, read_evaluation
from trtx.experiment.evaluation_verdict import judge_evaluation, read_scored_baseline
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.lifecycle import FinishedRun, OpenRun, new_run, resumed_run
from trtx.experiment.listener import RunListener
from trtx.experiment.provenance import provenance_with
from trtx.experiment.scoring import SESSION_LOG, common_tokenizer, is_scored, open_session, wait_loaded
from trtx.experiment.targets import attached_target, common_context_length
from trtx.launch import catch_signals
from trtx.report.evaluation import render_evaluation
from trtx.runs.forms import Deployment, Provenance

_Evaluation = OpenRun[EvaluationSpec]


def evaluate(
    spec: EvaluationSpec, *, parent: Path, argv: Sequence[str], listener: RunListener | None = None
) -> FinishedRun:
    """Scores every topology in turn, or the deployment at ``spec.attach``.

    Tasks, datasets and plans are checked before the first topology starts. If the run ends early, the error is
    re-raised after the scores so far have been rendered.
    """
    if spec.baseline is not None:
        read_scored_baseline(Path(spec.baseline))
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    with new_run(spec, parent, argv, listener, deployment) as run:
        target = _prepare(run)
        run.write_plans()
        is_known = spec.attach is None or target is not None
        here = run.environment
        provenance = provenance_with(here, run.plans, target) if is_known else Provenance(here, {})
        with run.held(provenance), _session(run, target) as session:
            return _score(run, session, spec.labels)


def resume_evaluation(run_dir: Path, *, argv: Sequence[str], listener: RunListener | None = None) -> FinishedRun:
    """Continues a run that ended early: requests the missing samples, then judges and renders everything.

    Raises UsageError, leaving the run unchanged, as :func:`resumed_run`, and if model or configs differ from the
    recorded ones.
    """
    with resumed_run(run_dir, read_evaluation, argv, listener) as (run, _):
        left = tuple(label for label in run.spec.labels if not is_scored(run.run_dir, label))
        if run.spec.attach is not None and left:
            run.find_deployment(run.spec.attach)
        target = _prepare(run)
        run.go_on(kept=tuple(label for label in run.spec.labels if label not in left), missing=left)
        if not left:
            with _measuring(run):
                pass
            return run.finished()
        with _session(run, target) as session:
            return _score(run, session, left)


def _prepare(run: _Evaluation) -> Target | None:
    """Plans every topology, or returns the attached target, if its tokenizer is known."""
    run.plan()
    tell_left_out(run.plans, run.listener.on_note)
    if run.spec.attach is None or run.deployment is None:
        return None
    return _attached(run.spec.attach, run.deployment)


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


@contextmanager
def _session(run: _Evaluation, target: Target | None) -> Iterator[Session]:
    """Runs lm-eval in its process, and handles signals from here on."""
    tokenizer = None if target is None else target.tokenizer_path
    if run.deployment is None:
        tokenizer, context = common_tokenizer(run.plans), common_context_length(run.plans)
    else:
        context = ask_context_length(run.deployment)
    log = run.run_dir / SESSION_LOG
    with catch_signals(run.interruption), open_session(run.spec, tokenizer, context, log) as session:
        yield session


def _measuring(run: _Evaluation) -> AbstractContextManager[None]:
    return run.measuring(partial(judge_evaluation, run.run_dir, run.spec), render_evaluation)


def _score(run: _Evaluation, session: Session, labels: Sequence[str]) -> FinishedRun:
    run.listener.on_loading(run.run_dir / SESSION_LOG)
    loaded = wait_loaded(run.spec, session, run.check)
    with _measuring(run):
        run.listener.on_loaded(loaded.samples, tuple(labels))
        for label in labels:
            with run.reach(label, eval_directory(run.run_dir, label)) as (endpoint, check):
                session.ask(endpoint, check, run.listener.on_scored)
    return run.finished()

"""The run of ``trtx eval fidelity``: computes the reference on a GPU, frees it, and then compares each topology."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trtx.bench import Journal, Target
from trtx.bench.intact import run_ended, run_failed
from trtx.bench.journal import ProcessRestart, RunResumed, TopologyReady, TopologyStopping
from trtx.bench.judge.judgement import Judgement, Verdict
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.evals import Endpoint
from trtx.evals.fidelity import fidelity_directory, judge_fidelity, read_fidelity
from trtx.evals.fidelity.asking import ask_served
from trtx.evals.fidelity.forms import Sequence as Scored
from trtx.evals.fidelity.forms import reference_directory
from trtx.evals.fidelity.prompts import Prompts, read_prompts
from trtx.evals.fidelity.reference import (
    Reference,
    check_same_vocabulary,
    find_reference,
    make_reference,
    read_reference,
)
from trtx.experiment import directory
from trtx.experiment.bench import resumption
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.bench.verdict import error_of, run_verdict
from trtx.experiment.deployment import api_key, ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.evaluation import EvaluationListener, FinishedEvaluation
from trtx.experiment.fidelity_spec import FidelitySpec, read_fidelity_spec
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.provenance import provenance_with
from trtx.experiment.targets import attached_target, target_of
from trtx.launch import Interruption, catch_signals, prepare, serve
from trtx.report import REPORT_FILE
from trtx.report.fidelity import render_fidelity
from trtx.runs.forms import LOCK, PLAN, VERDICT, AskedOf, Deployment, Environment, RunVerdict
from trtx.topology import Plan

_SERVED_PATIENCE_S, _ATTACHED_PATIENCE_S = 30.0, 5.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True, eq=False)
class _Run:
    """State of a run in progress."""

    spec: FidelitySpec
    run_dir: Path
    listener: EvaluationListener
    here: Environment
    deployment: Deployment | None = None  # of an attached run
    interruption: Interruption = field(default_factory=Interruption)
    check_directory: Callable[[], None] = lambda: None  # raises UsageError once the directory has been removed
    plans: dict[str, Plan] = field(default_factory=dict)  # by topology

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    def check(self) -> None:
        self.interruption.check()
        self.check_directory()


def run_fidelity(
    spec: FidelitySpec, *, parent: Path, argv: Sequence[str], listener: EvaluationListener | None = None
) -> FinishedEvaluation:
    """Computes the reference, then compares every topology in turn, or the deployment at ``spec.attach``.

    Prompts, tokenizers and plans are checked before anything starts. If the run ends early, the error is re-raised
    after the comparisons so far have been rendered.
    """
    started_at = datetime.now(UTC)
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    run_dir = directory.create(parent, spec, started_at)
    here = environment(argv, started_at, deployment)
    state = _Run(spec, run_dir, listener or EvaluationListener(), here, deployment)
    try:
        with directory.told_if_unwritable(run_dir):
            target = _prepare(state)
            reference = _reference(state, target)
            prompts = read_prompts(_asked(spec), reference.path)
            _write_plans(state)
            provenance = provenance_with(_no_calls, here, state.plans, target, _hash(spec.prompt_file))
            directory.write_lock(run_dir, spec, provenance)
            with directory.hold(run_dir) as state.check_directory, catch_signals(state.interruption):
                state.listener.on_start(run_dir)
                return _compare(state, _make(state, reference, prompts), spec.labels)
    except UsageError:
        _remove_if_nothing_served(run_dir)
        raise


@directory.goes_on
def resume_fidelity(
    run_dir: Path, *, argv: Sequence[str], listener: EvaluationListener | None = None
) -> FinishedEvaluation:
    """Continues a run that ended early: requests the missing sequences, using the existing reference, and renders
    everything.

    Raises UsageError, leaving the run unchanged, if another trtx uses the directory, or if machine, versions, model,
    prompts or configs differ from the recorded ones.
    """
    spec = read_fidelity_spec(run_dir)
    with directory.told_if_unwritable(run_dir), directory.hold(run_dir) as check_directory:
        recorded = _read_recorded(run_dir, spec)
        here = environment(argv, datetime.now(UTC))
        resumption.check_conditions(recorded, here)
        resumption.wait_for_the_end(recorded)
        state = _Run(spec, run_dir, listener or EvaluationListener(), here, check_directory=check_directory)
        left = tuple(label for label in spec.labels if not _is_complete(run_dir, label))
        if spec.attach is not None and left:
            state.deployment = ask_deployment(spec.attach)
            resumption.check_deployment(recorded, state.deployment)
        target = _prepare(state, anew=True)
        for label, plan in state.plans.items():
            resumption.check_plan(recorded, label, plan)
        made = read_reference(run_dir)
        if made is None:
            if recorded.dataset_sha256 != _hash(spec.prompt_file):
                raise UsageError(f"{run_dir} can't be resumed: {shown(spec.prompt_file)} has changed; start a new run")
            reference = _reference(state, target)
            prompts = read_prompts(_asked(spec), reference.path)
        state.journal.mend()
        _write_plans(state)
        kept = tuple(label for label in spec.labels if label not in left)
        state.journal.note(RunResumed(command=shlex.join(argv), kept=kept, missing=left))
        (run_dir / VERDICT.file).unlink(missing_ok=True)
        with catch_signals(state.interruption):
            state.listener.on_start(run_dir)
            sequences = _make(state, reference, prompts) if made is None else made[1]
            return _compare(state, sequences, left)


def _is_complete(run_dir: Path, label: str) -> bool:
    found = read_fidelity(run_dir, label)
    return found is not None and found.answered == found.sequences


def _read_recorded(run_dir: Path, spec: FidelitySpec) -> resumption.Recorded[FidelitySpec]:
    told = LOCK.read(run_dir, AskedOf).provenance
    planned = (
        resumption.PlanDocument({}, {}) if spec.attach is not None else PLAN.read(run_dir, resumption.PlanDocument)
    )
    return resumption.Recorded(
        run_dir, spec, planned.topologies, planned.checkpoints, told.environment, told.dataset_sha256
    )


def _no_calls(target: Target) -> dict[str, str]:
    return {}


def _asked(spec: FidelitySpec) -> int | Path:
    return spec.prompt_file or spec.prompts or 0


def _hash(file: Path | None) -> str | None:
    """SHA-256 of a file; None without one. An unreadable file also gives None, since its next reader reports
    the error.
    """
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _prepare(state: _Run, *, anew: bool = False) -> Target | None:
    """Plans every topology, or finds the attached target. ``anew``: in new directories next to those of an earlier
    attempt.
    """
    for topology in state.spec.topologies:
        home = state.run_dir / topology.label
        if anew and home.exists():
            home = home / f"start-{len(list(home.glob('start-*'))) + 2:02d}"
        state.plans[topology.label] = prepare(topology.spec, run_dir=home)
    tell_left_out(state.plans, state.listener.on_told)
    if state.spec.attach is None or state.deployment is None:
        return None
    return _attached(state.spec.attach, state.deployment)


def _attached(attach: Attach, deployment: Deployment) -> Target:
    try:
        return attached_target(attach, deployment)
    except UsageError as error:
        raise UsageError(
            f"the tokenizer of {deployment.model} is not here ({error}), and token ids are compared; expected its "
            "directory with --tokenizer"
        ) from error


def _reference(state: _Run, target: Target | None) -> Reference:
    served = [plan.model_path for plan in state.plans.values()]
    reference = find_reference(state.spec.reference, served[0] if served else None)
    for path in {*served, *([target.tokenizer_path] if target is not None else [])}:
        check_same_vocabulary(reference.path, path)
    return reference


def _write_plans(state: _Run) -> None:
    if state.spec.attach is None:
        prints = {label: resumption.fingerprint(plan.model_path) for label, plan in state.plans.items()}
        plans = {label: plan.to_json() for label, plan in state.plans.items()}
        PLAN.write(state.run_dir, {"topologies": plans, "checkpoints": prints})


def _make(state: _Run, reference: Reference, prompts: Prompts) -> tuple[Scored, ...]:
    """Computes the reference on the first GPU of the topologies, which is free again afterwards."""
    state.listener.on_topology("reference")
    plan = next(iter(state.plans.values()), None)
    gpus = None if plan is None else plan.workers[0].env.get(_VISIBLE, "").partition(",")[0]
    names = [gpu.name for gpu in state.here.gpus] if plan is None else plan.gpu_names
    _, sequences = make_reference(
        state.run_dir,
        reference,
        prompts,
        osl=state.spec.osl,
        gpus=gpus,
        device=names[0] if names else "CPU",
        check=state.check,
        on_progress=state.listener.on_progress,
    )
    return sequences


def _compare(state: _Run, sequences: tuple[Scored, ...], labels: Sequence[str]) -> FinishedEvaluation:
    with _rendered_whatever_happens(state):
        for label in labels:
            state.listener.on_topology(label)
            if label == ATTACHED:
                assert state.deployment is not None
                url, model, key = state.deployment.url, state.deployment.model, api_key(state.deployment)
                _ask(state, Endpoint(label, url, model, _home(state, label), _ATTACHED_PATIENCE_S, key), sequences)
            else:
                _serve_and_ask(state, label, sequences)
    error = error_of(VERDICT.read(state.run_dir, RunVerdict))
    return FinishedEvaluation(state.run_dir, state.run_dir / REPORT_FILE, error)


def _serve_and_ask(state: _Run, label: str, sequences: tuple[Scored, ...]) -> None:
    plan = state.plans[label]
    with serve(
        plan, on_event=lambda event: state.listener.on_event(label, event), interruption=state.interruption
    ) as served:
        loaded, warmed_up = round(served.load_seconds, 3), round(served.warm_up_seconds, 3)
        state.journal.note(TopologyReady(topology=label, load_seconds=loaded, warm_up_seconds=warmed_up))
        try:
            target = target_of(label, plan)
            home, own = _home(state, label), target.certificate
            endpoint = Endpoint(label, target.url, target.model, home, _SERVED_PATIENCE_S, certificate=own)
            _ask(state, endpoint, sequences, served.check)
        finally:
            restarts = tuple(ProcessRestart(name=one.name, at=one.at, exit=one.exit) for one in served.restarts)
            state.journal.note(TopologyStopping(topology=label, restarts=restarts))


def _ask(
    state: _Run, endpoint: Endpoint, sequences: tuple[Scored, ...], served: Callable[[], None] = lambda: None
) -> None:
    def check() -> None:
        served()
        state.check()

    ask_served(endpoint, sequences, state.spec.concurrency, check=check, on_progress=state.listener.on_progress)


def _home(state: _Run, label: str) -> str:
    return str(fidelity_directory(state.run_dir, label))


@contextmanager
def _rendered_whatever_happens(state: _Run) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError, UsageError):  # the first failure is the one to report
            state.check_directory()  # if the directory is gone, there is nothing to render
            state.journal.note(run_failed(state.run_dir, error))
            render_fidelity(state.run_dir)
        raise
    _judge(state.run_dir, state.spec)
    state.journal.note(run_ended(state.run_dir))
    render_fidelity(state.run_dir)


def _judge(run_dir: Path, spec: FidelitySpec) -> None:
    judgements: list[Judgement] = []
    for label in spec.labels:
        found = read_fidelity(run_dir, label)
        if found is None:
            why = "it was not compared; see the journal"
            judgements.append(Judgement(cell=label, criterion="compared", verdict=Verdict.FAILED, reason=why))
        else:
            judgements += judge_fidelity(found, spec.max_kl, spec.min_agreement)
    VERDICT.write(run_dir, run_verdict((), judgements, None))


def _remove_if_nothing_served(run_dir: Path) -> None:
    """Removes a run directory without results, so that invalid input leaves none behind."""
    if (run_dir / "journal.jsonl").exists() or not run_dir.is_dir():
        return
    for document in (PLAN, LOCK):
        (run_dir / document.file).unlink(missing_ok=True)
    shutil.rmtree(reference_directory(run_dir), ignore_errors=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()

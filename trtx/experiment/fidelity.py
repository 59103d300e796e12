"""The run of ``trtx eval fidelity``: computes the reference on a GPU, frees it, and then compares each topology."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trtx.bench import Target
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.evals.fidelity import fidelity_directory, judge_fidelity, read_fidelity
from trtx.evals.fidelity.asking import ask_served
from trtx.evals.fidelity.forms import ReferenceSequence as Scored
from trtx.evals.fidelity.prompts import FidelityPrompts, read_prompts
from trtx.evals.fidelity.reference import (
    Reference,
    check_same_vocabulary,
    find_reference,
    make_reference,
    read_reference,
)
from trtx.experiment.bench.spec import Attach
from trtx.experiment.bench.verdict import run_verdict
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.fidelity_spec import FidelitySpec, read_fidelity_spec
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.lifecycle import FinishedRun, OpenRun, new_run, resumed_run
from trtx.experiment.listener import RunListener
from trtx.experiment.provenance import provenance_with
from trtx.experiment.targets import attached_target
from trtx.launch import catch_signals
from trtx.report.fidelity import render_fidelity
from trtx.runs.forms import VERDICT, Deployment

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_Fidelity = OpenRun[FidelitySpec]


def run_fidelity(
    spec: FidelitySpec, *, parent: Path, argv: Sequence[str], listener: RunListener | None = None
) -> FinishedRun:
    """Computes the reference, then compares every topology in turn, or the deployment at ``spec.attach``.

    Prompts, tokenizers and plans are checked before anything starts. If the run ends early, the error is re-raised
    after the comparisons so far have been rendered.
    """
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    with new_run(spec, parent, argv, listener, deployment) as run:
        target = _prepare(run)
        reference = _reference(run, target)
        prompts = read_prompts(_asked(spec), reference.path)
        run.write_plans()
        provenance = provenance_with(run.environment, run.plans, target, _hash(spec.prompt_file))
        with run.held(provenance):
            return _compare(run, _make(run, reference, prompts), spec.labels)


def resume_fidelity(run_dir: Path, *, argv: Sequence[str], listener: RunListener | None = None) -> FinishedRun:
    """Continues a run that ended early: requests the missing sequences, using the existing reference, and renders
    everything.

    Raises UsageError, leaving the run unchanged, as :func:`resumed_run`, and if model, prompts or configs differ from
    the recorded ones.
    """
    with resumed_run(run_dir, read_fidelity_spec, argv, listener) as (run, recorded):
        spec, run_dir = run.spec, run.run_dir
        left = tuple(label for label in spec.labels if not _is_complete(run_dir, label))
        if spec.attach is not None and left:
            run.find_deployment(spec.attach)
        target = _prepare(run)
        made = read_reference(run_dir)
        if made is None:
            if recorded.dataset_sha256 != _hash(spec.prompt_file):
                raise UsageError(f"{run_dir} can't be resumed: {shown(spec.prompt_file)} has changed; start a new run")
            reference = _reference(run, target)
            prompts = read_prompts(_asked(spec), reference.path)
        run.go_on(kept=tuple(label for label in spec.labels if label not in left), missing=left)
        return _compare(run, _make(run, reference, prompts) if made is None else made[1], left)


def _is_complete(run_dir: Path, label: str) -> bool:
    found = read_fidelity(run_dir, label)
    return found is not None and found.answered == found.sequences


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


def _prepare(run: _Fidelity) -> Target | None:
    """Plans every topology, or returns the attached target."""
    run.plan()
    tell_left_out(run.plans, run.listener.on_note)
    if run.spec.attach is None or run.deployment is None:
        return None
    return _attached(run.spec.attach, run.deployment)


def _attached(attach: Attach, deployment: Deployment) -> Target:
    try:
        return attached_target(attach, deployment)
    except UsageError as error:
        raise UsageError(
            f"the tokenizer of {deployment.model} is needed to compare token ids and is not on this machine ({error}); "
            "give its directory with --tokenizer"
        ) from error


def _reference(run: _Fidelity, target: Target | None) -> Reference:
    served = [plan.model_path for plan in run.plans.values()]
    reference = find_reference(run.spec.reference, served[0] if served else None)
    for path in {*served, *([target.tokenizer_path] if target is not None else [])}:
        check_same_vocabulary(reference.path, path)
    return reference


def _make(run: _Fidelity, reference: Reference, prompts: FidelityPrompts) -> tuple[Scored, ...]:
    """Computes the reference on the first GPU of the topologies, which is free again afterwards."""
    run.announce()
    run.listener.on_reference()
    plan = next(iter(run.plans.values()), None)
    gpus = None if plan is None else plan.workers[0].env.get(_VISIBLE, "").partition(",")[0]
    names = [gpu.name for gpu in run.environment.gpus] if plan is None else plan.gpu_names
    with catch_signals(run.interruption):
        _, sequences = make_reference(
            run.run_dir,
            reference,
            prompts,
            osl=run.spec.osl,
            gpus=gpus,
            device=names[0] if names else "CPU",
            check=run.check,
            on_progress=run.listener.on_scored,
        )
    return sequences


def _compare(run: _Fidelity, sequences: tuple[Scored, ...], labels: Sequence[str]) -> FinishedRun:
    with run.measuring(partial(_judge, run.run_dir, run.spec), render_fidelity):
        for label in labels:
            with run.reach(label, fidelity_directory(run.run_dir, label)) as (endpoint, check):
                asked = run.spec.concurrency
                ask_served(endpoint, sequences, asked, check=check, on_progress=run.listener.on_scored)
    return run.finished()


def _judge(run_dir: Path, spec: FidelitySpec) -> None:
    judgements: list[CheckResult] = []
    for label in spec.labels:
        found = read_fidelity(run_dir, label)
        if found is None:
            why = "it was not compared; see the journal"
            judgements.append(CheckResult(cell=label, criterion="compared", verdict=Verdict.FAILED, reason=why))
        else:
            judgements += judge_fidelity(found, spec.max_kl, spec.min_agreement)
    VERDICT.write(run_dir, run_verdict((), judgements, None))

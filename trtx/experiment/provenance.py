"""The provenance of a run for its manifest: environment, model files, resolved configs, aiperf commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from trtx.bench import LoadSpec, Target, as_sent, cell_directory, cell_name, command, trial_directory
from trtx.checkpoint.identity import FilesIdentity, identify_model, identify_tokenizer
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.experiment.bench.spec import ATTACHED, ExperimentSpec
from trtx.experiment.left_out import left_out_of
from trtx.experiment.targets import target_of
from trtx.runs.forms import Environment, Files, MeasuredMode, Provenance
from trtx.topology import Plan


def provenance_of(
    spec: ExperimentSpec, environment: Environment, plans: Mapping[str, Plan], attached: Target | None
) -> Provenance:
    """The provenance of a run. ``plans``: by topology; ``attached``: the server used instead of them.

    Reads each model's files (seconds at most) and the complete input_file. Raises UsageError for an unreadable file.
    """
    return provenance_with(environment, plans, attached, read_dataset(spec.load), partial(_calls, spec))


def provenance_with(
    environment: Environment,
    plans: Mapping[str, Plan],
    attached: Target | None,
    dataset_sha256: str | None = None,
    calls: Callable[[Target], dict[str, str]] = lambda target: {},
) -> Provenance:
    """Like :func:`provenance_of`. ``calls`` returns aiperf's commands for a target, by cell."""
    if attached is not None:
        files = _files(identify_tokenizer(attached.tokenizer_path))
        measured = {ATTACHED: MeasuredMode(None, attached.model, files, None, None, None, calls(attached))}
        return Provenance(environment, measured, dataset_sha256)
    identities = {path: _files(identify_model(path)) for path in {plan.model_path for plan in plans.values()}}
    return Provenance(
        environment,
        {
            label: MeasuredMode(
                engine=plan.engine,
                model=plan.model,
                files=identities[plan.model_path],
                gpu_names=plan.gpu_names,
                workers=plan.expected_workers(),
                engine_configs=plan.engine_configs,
                aiperf=calls(target_of(label, plan)),
                left_out=left_out_of(plan),
            )
            for label, plan in plans.items()
        },
        dataset_sha256,
    )


def read_dataset(load: LoadSpec) -> str | None:
    """Hash of the input_file's content; None without one. Raises UsageError if it can't be read."""
    try:
        return load.dataset_sha256
    except OSError as error:
        raise UsageError(
            f"input_file {shown(load.input_file)} can't be read ({error.strerror or error}); check its path "
            "and permissions"
        ) from error


def _files(identity: FilesIdentity) -> Files:
    return Files(**asdict(identity))


def _calls(spec: ExperimentSpec, target: Target) -> dict[str, str]:
    """aiperf's command for the first trial of each cell, with paths relative to the run directory."""
    calls, sent = {}, as_sent(spec.load, Path(), target.topology)
    for load in spec.load.loads:
        name = cell_name(target.topology, load)
        trial = trial_directory(cell_directory(Path(), name), 1)
        calls[name] = shlex.join(command(target, sent, load, 1, trial))
    return calls

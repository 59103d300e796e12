"""Resumes a run that ended early: finds the trials to keep, and checks whether new measurements are comparable.

A trial is kept if all its records exist; failed requests are results and are kept too. Everything else from an earlier
attempt is moved to ``attempts/<n>/`` under its original path, and the trial is measured again with the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from trtx.bench import (
    Target,
    cell_directory,
    cell_name,
    held_trials,
    read_journal,
    rewrite_cells,
    trial_directory,
)
from trtx.bench import (
    changed_files as changed_in,
)
from trtx.bench.cells import CELL
from trtx.bench.journal import LoadStarted
from trtx.config.wording import shown, with_list
from trtx.errors import UsageError
from trtx.evals import marker
from trtx.experiment.bench.schedule import ScheduledStart, schedule, without
from trtx.experiment.bench.spec import ATTACHED, ExperimentSpec
from trtx.experiment.directory import RunSpec
from trtx.experiment.provenance import read_dataset
from trtx.experiment.scoring import SESSION_LOG, is_scored
from trtx.experiment.targets import target_of
from trtx.launch import members
from trtx.runs.forms import LOCK, PLAN, AskedOf, Deployment, Environment
from trtx.topology import Plan

ATTEMPTS = "attempts"
END_S = 20.0  # a guardian ends the processes of a killed launcher within 7 s

# Values that affect metrics, apart from the plan. Kernel name, machine load and command may differ.
_CONDITIONS = (
    "trtx_sources", "python", "versions", "torch_cuda", "cpu", "cpu_cores", "gpus", "gpu_driver", "driver_cuda",
)  # fmt: skip
_PLANNED = ("engine", "model", "model_path", "gpu_names", "engine_configs")

Spec = TypeVar("Spec", bound=RunSpec)


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """Content of ``plan.json``."""

    topologies: dict[str, Plan]
    checkpoints: dict[str, str]  # by topology, from :func:`fingerprint`


@dataclass(frozen=True, slots=True)
class Recorded(Generic[Spec]):
    """The documents of an earlier attempt."""

    run_dir: Path
    spec: Spec
    plans: dict[str, Plan]  # by topology; empty for an attached run
    checkpoints: dict[str, str]  # by topology, from :func:`fingerprint`
    environment: Environment
    dataset_sha256: str | None  # of the input_file; None: no input_file, or not recorded

    @property
    def deployment(self) -> Deployment:
        """The deployment of an attached run. Raises UsageError if it was not recorded, since nothing can be compared
        then.
        """
        if self.environment.deployment is None:
            path = self.run_dir / LOCK.file
            raise UsageError(
                f"{path} does not say which deployment was measured, so the run can't be resumed; start a new run"
            )
        return self.environment.deployment

    def target(self, label: str) -> Target:
        """The measured target, with the fields that affect its cells."""
        if label == ATTACHED:
            before = self.deployment
            return Target(before.url, before.model, Path(), ATTACHED, before.gpu_count, before.worker_count)
        return target_of(label, self.plans[label])


def read_recorded(run_dir: Path, spec: Spec) -> Recorded[Spec]:
    """Reads ``plan.json`` and the manifest's provenance. Raises UsageError if the run ended before it wrote them."""
    provenance = LOCK.read(run_dir, AskedOf).provenance
    planned = PLAN.read(run_dir, PlanDocument) if spec.topologies else PlanDocument({}, {})
    return Recorded(
        run_dir, spec, planned.topologies, planned.checkpoints, provenance.environment, provenance.dataset_sha256
    )


def wait_for_the_end(recorded: Recorded[Any]) -> None:
    """Waits until all processes of a killed attempt have ended; their load would interfere, and they hold the GPUs.

    Raises UsageError if some still run after END_S.
    """
    markers = [marker(recorded.run_dir / SESSION_LOG), *(plan.marker for plan in recorded.plans.values())]
    markers += [f"TMPDIR={event.scratch}" for event in read_journal(recorded.run_dir) if isinstance(event, LoadStarted)]
    deadline = time.monotonic() + END_S
    while alive := {pid for one in markers for pid in members(one, ())}:
        if time.monotonic() > deadline:
            raise UsageError(
                f"processes of an earlier attempt of {recorded.run_dir} still run (pid "
                f"{', '.join(map(str, sorted(alive)))}); end them and resume again"
            )
        time.sleep(0.1)


def missing_steps(recorded: Recorded[ExperimentSpec]) -> tuple[ScheduledStart, ...]:
    """The remaining steps to measure and score, in their original order. Writes nothing."""
    held = {
        label: held_trials(recorded.run_dir, recorded.target(label), recorded.spec.load)
        for label in recorded.spec.labels
    }
    scored = [label for label in recorded.spec.labels if is_scored(recorded.run_dir, label)]
    return without(schedule(recorded.spec), held, scored)


def changed_files(recorded: Recorded[ExperimentSpec]) -> tuple[str, ...]:
    """Returns why completed trials are measured again: one sentence for each changed file."""
    return tuple(
        sentence
        for label in recorded.spec.labels
        for sentence in changed_in(recorded.run_dir, recorded.target(label), recorded.spec.load)
    )


def clear_the_way(recorded: Recorded[ExperimentSpec], missing: Sequence[ScheduledStart]) -> None:
    """Moves the remains of missing trials aside, and rewrites the cells from the trials that are kept."""
    run_dir = recorded.run_dir
    attempt = run_dir / ATTEMPTS / str(1 + len(list((run_dir / ATTEMPTS).glob("*"))))
    for step in missing:
        for trial in step.trials:
            cell = cell_directory(run_dir, cell_name(step.label, trial.load))
            for path in (trial_directory(cell, trial.number), cell / CELL.file):
                if path.exists():
                    aside = attempt / path.relative_to(run_dir)
                    aside.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(aside)
    for label in recorded.spec.labels:
        target = replace(recorded.target(label), gpu_hour_price=recorded.spec.gpu_hour_price)
        rewrite_cells(run_dir, target, recorded.spec.load)


def check_conditions(recorded: Recorded[Any], now: Environment) -> None:
    """Raises UsageError if machine, versions or commit differ from those of the cells that are kept."""
    before = recorded.environment
    compared = [(name, getattr(before, name), getattr(now, name)) for name in _CONDITIONS]
    _refuse(recorded.run_dir, [_difference(*both) for both in compared if both[1] != both[2]])


def check_dataset(recorded: Recorded[ExperimentSpec]) -> None:
    """Raises UsageError if the input_file's content has changed or can't be read."""
    before, now = recorded.dataset_sha256, read_dataset(recorded.spec.load)
    if before is not None and before != now:
        _refuse(recorded.run_dir, [f"the content of input_file {shown(recorded.spec.load.input_file)} has changed"])


def check_deployment(recorded: Recorded[Any], now: Deployment) -> None:
    """Raises UsageError if the information that an attached deployment publishes has changed."""
    compared = [(one.name, getattr(recorded.deployment, one.name), getattr(now, one.name)) for one in fields(now)]
    _refuse(recorded.run_dir, [_difference(*both) for both in compared if both[1] != both[2]])


def check_plan(recorded: Recorded[Any], label: str, plan: Plan) -> None:
    """Raises UsageError if the topology has changed: engine, model and its files, GPUs, configs or workers."""
    before, now = (
        {name: one.to_json()[name] for name in _PLANNED} | {"workers": one.expected_workers()}
        for one in (recorded.plans[label], plan)
    )
    differences = [
        _difference(f"{name} of {label}", before[name], now[name]) for name in before if before[name] != now[name]
    ]
    if not differences and recorded.checkpoints[label] != fingerprint(plan.model_path):
        differences.append(f"the files under {plan.model_path} have changed")
    _refuse(recorded.run_dir, differences)


def fingerprint(model_path: Path) -> str:
    """Hash of the names, sizes and modification times of a checkpoint's files; reading the weights would take
    minutes.
    """
    entries = sorted(
        (str(path.relative_to(model_path)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in model_path.rglob("*")
        if path.is_file()
    )
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _refuse(run_dir: Path, differences: Sequence[str]) -> None:
    if differences:
        problem = f"{run_dir} can't be resumed, because its cells would not be comparable; start a new run"
        raise UsageError(with_list(problem, differences))


def _difference(name: str, before: Any, now: Any) -> str:
    """A difference as text: for mappings the differing entries, otherwise both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return ", ".join(_difference(f"{name} {key}", before.get(key), now.get(key)) for key in parts)
    return f"{name} was {before} and is {now}"

"""``--dry-run``: what a run would start and send, and its baseline, without starting anything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trtx.bench import (
    Target,
    as_sent,
    cell_directory,
    cell_name,
    check_load,
    check_settings,
    command,
    planned_trials,
    trial_directory,
)
from trtx.experiment import gate
from trtx.experiment.baselines.conditions import conditions_of
from trtx.experiment.bench.spec import ATTACHED, ExperimentSpec
from trtx.experiment.deployment import ask_context_length, ask_deployment
from trtx.experiment.environment import environment
from trtx.experiment.left_out import refuse_equal
from trtx.experiment.load_fit import check_attached, check_fits
from trtx.experiment.provenance import provenance_of
from trtx.experiment.scoring import common_tokenizer, open_session, wait_loaded
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.experiment.targets import attached_target, common_context_length, target_of
from trtx.launch import check_usual_client, prepare
from trtx.runs.forms import ComparedWith, Deployment
from trtx.topology import Plan


@dataclass(frozen=True, slots=True)
class DryRunTopology:
    """One topology of a dry run: its plan (None when attached) and the aiperf commands, starting with all first
    trials.
    """

    label: str
    plan: Plan | None
    aiperf: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that was not started."""

    topologies: tuple[DryRunTopology, ...]
    baseline: ComparedWith | None  # None: no comparison, or one with a topology of the same run
    samples: dict[str, int]  # number of samples per topology, by task; empty without scoring


def plan_only(spec: ExperimentSpec, *, parent: Path) -> PlannedRun:
    """Plans what :func:`trtx.experiment.run` would start, without starting or writing anything.

    Paths contain RUN in place of the directory's name. Raises UsageError in the same cases as ``run`` before its start,
    including errors of the gate's baseline and of tasks.
    """
    run_dir = parent / "RUN"
    check_settings()
    check_load(spec.load)
    if spec.attach is not None:
        deployment = ask_deployment(spec.attach)
        target = attached_target(spec.attach, deployment)
        check_attached(deployment, target, spec.load)
        planned = DryRunTopology(ATTACHED, None, _aiperf(spec, target, run_dir))
        baseline = _baseline(spec, {}, target, deployment)
        samples = _samples(spec.eval, target.tokenizer_path, lambda: ask_context_length(deployment))
        return PlannedRun((planned,), baseline, samples)
    topologies: list[DryRunTopology] = []
    plans: dict[str, Plan] = {}
    for topology in spec.topologies:
        plan = prepare(topology.spec, run_dir=run_dir / topology.label)
        check_fits(plan, spec.load)
        check_usual_client(plan)
        plans[topology.label] = plan
        calls = _aiperf(spec, target_of(topology.label, plan), run_dir)
        topologies.append(DryRunTopology(topology.label, plan, calls))
    refuse_equal(spec, plans)
    samples = {}
    if spec.eval is not None:
        samples = _samples(spec.eval, common_tokenizer(plans), lambda: common_context_length(plans))
    return PlannedRun(tuple(topologies), _baseline(spec, plans, None, None), samples)


def _samples(asked: ScoringSpec | None, tokenizer: Path, context_length: Callable[[], int | None]) -> dict[str, int]:
    """Loads the tasks and their datasets as the run would, and counts their samples. Raises UsageError for invalid
    tasks.
    """
    if asked is None:
        return {}
    with (
        tempfile.TemporaryDirectory(prefix="trtx-") as scratch,
        open_session(asked, tokenizer, context_length(), Path(scratch) / "session.log") as session,
    ):
        return wait_loaded(asked, session, lambda: None).samples


def _baseline(
    spec: ExperimentSpec, plans: Mapping[str, Plan], target: Target | None, deployment: Deployment | None
) -> ComparedWith | None:
    """Finds the baseline. Inspects the machine and hashes the model's files only if there is something to compare."""
    gate.check_can_save(spec)
    if not gate.takes_baseline(spec):
        return None
    here = environment((), datetime.now(UTC), deployment)
    conditions = conditions_of(spec, plans, provenance_of(spec, here, plans, target))
    return gate.compared_with(spec, gate.baseline_of(spec, conditions), conditions)


def _aiperf(spec: ExperimentSpec, target: Target, run_dir: Path) -> tuple[tuple[str, ...], ...]:
    calls, sent = [], as_sent(spec.load, run_dir, target.topology)
    for trial in planned_trials(spec.load):
        cell = cell_directory(run_dir, cell_name(target.topology, trial.load))
        calls.append(command(target, sent, trial.load, trial.number, trial_directory(cell, trial.number)))
    return tuple(calls)

"""The order in which a run serves its topologies, and what it measures on each start. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtx.bench import PlannedTrial, planned_trials
from trtx.experiment.bench.spec import ExperimentSpec


@dataclass(frozen=True, slots=True)
class ScheduledStart:
    """One start of a topology, with the trials that are measured on it."""

    label: str  # of the topology
    trials: tuple[PlannedTrial, ...]
    is_scored: bool = False  # scored after the trials


def schedule(spec: ExperimentSpec) -> tuple[ScheduledStart, ...]:
    """The steps of a run: each topology once with all its trials or, with ``order: abba``, once per block.

    With ``abba``, each block restarts every topology, in the reverse order of the previous block, so that a steady
    drift, such as a room that warms up, affects all topologies alike.

    A topology is scored after its trials on the same start. Scoring first would leave prompts in its caches and heat in
    the machine, so a run with scores would not be comparable with one without. For the same reason, all blocks are
    measured before the first topology is scored, which then happens on separate starts.
    """
    is_scored = spec.eval is not None
    trials = planned_trials(spec.load)
    if spec.order == "in turn":
        return tuple(ScheduledStart(label, trials, is_scored) for label in spec.labels)
    steps = []
    for number in range(1, spec.load.trials + 1):
        labels = spec.labels if number % 2 else spec.labels[::-1]
        steps += [ScheduledStart(label, tuple(trial for trial in trials if trial.number == number)) for label in labels]
    steps += [ScheduledStart(label, (), is_scored) for label in spec.labels if is_scored]
    return tuple(steps)


def without(
    steps: tuple[ScheduledStart, ...], held: Mapping[str, Collection[PlannedTrial]], scored: Collection[str] = ()
) -> tuple[ScheduledStart, ...]:
    """The steps that remain if the trials in ``held`` and the scores of the topologies in ``scored`` exist already."""
    left = (
        ScheduledStart(
            step.label,
            tuple(trial for trial in step.trials if trial not in held[step.label]),
            step.is_scored and step.label not in scored,
        )
        for step in steps
    )
    return tuple(step for step in left if step.trials or step.is_scored)

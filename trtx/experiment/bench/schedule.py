"""In which order a run serves its topologies, and what it measures each time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtx.bench import PlannedTrial, planned_trials
from trtx.experiment.bench.spec import ExperimentSpec


@dataclass(frozen=True, slots=True)
class Step:
    """One topology, started for it, and the trials that are measured on it before it is stopped."""

    label: str  # of the topology
    trials: tuple[PlannedTrial, ...]
    is_scored: bool = False  # after them


def schedule(spec: ExperimentSpec) -> tuple[Step, ...]:
    """Every topology once, with all its trials; or ``order: abba``, where each round of trials starts each topology
    anew, in the order of the one before reversed: what drifts steadily, as a warming room does, meets all alike.

    A topology is scored after its trials, on the same start: before them, scoring would leave its prompts in the caches
    and its heat in the machine, and a run with scores would not compare with one without. For the same reason rounds
    are all measured before the first topology is scored, each on a start of its own.
    """
    is_scored = spec.eval is not None
    trials = planned_trials(spec.load)
    if spec.order == "in turn":
        return tuple(Step(label, trials, is_scored) for label in spec.labels)
    steps = []
    for number in range(1, spec.load.trials + 1):
        labels = spec.labels if number % 2 else spec.labels[::-1]
        steps += [Step(label, tuple(trial for trial in trials if trial.number == number)) for label in labels]
    steps += [Step(label, (), is_scored) for label in spec.labels if is_scored]
    return tuple(steps)


def without(
    steps: tuple[Step, ...], held: Mapping[str, Collection[PlannedTrial]], scored: Collection[str] = ()
) -> tuple[Step, ...]:
    """What is left of it where these trials, by topology, have a result already, and these topologies their scores."""
    left = (
        Step(
            step.label,
            tuple(trial for trial in step.trials if trial not in held[step.label]),
            step.is_scored and step.label not in scored,
        )
        for step in steps
    )
    return tuple(step for step in left if step.trials or step.is_scored)

"""In which order topologies are served and trials measured, and what is left of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtx.bench import planned_trials
from trtx.experiment import load_sweep
from trtx.experiment.bench.schedule import schedule, without
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.scoring_spec import ScoringSpec


def _spec(arms: int, trials: int, order: str) -> ExperimentSpec:
    named = {f"arm{number}": {"engine": "paced"} for number in range(arms)}
    return load_sweep(None, {"arms": named, "order": order, "load": {"concurrency": [1, 8], "trials": trials}})


def _said(spec: ExperimentSpec) -> list[tuple[str, list[tuple[str, int]]]]:
    return [(step.label, [(one.load.label, one.number) for one in step.trials]) for step in schedule(spec)]


def test_in_turn_each_topology_is_started_once_with_all_trials() -> None:
    trials = [("c1", 1), ("c8", 1), ("c1", 2), ("c8", 2)]
    assert _said(_spec(2, 2, "in turn")) == [("arm0", trials), ("arm1", trials)]


def test_abba_starts_each_topology_in_each_round_and_every_other_round_backwards() -> None:
    assert _said(_spec(2, 3, "abba")) == [
        ("arm0", [("c1", 1), ("c8", 1)]), ("arm1", [("c1", 1), ("c8", 1)]),
        ("arm1", [("c1", 2), ("c8", 2)]), ("arm0", [("c1", 2), ("c8", 2)]),
        ("arm0", [("c1", 3), ("c8", 3)]), ("arm1", [("c1", 3), ("c8", 3)]),
    ]  # fmt: skip


def test_a_topology_is_scored_after_its_trials_and_arms_after_all_rounds() -> None:
    asked = {"eval": ScoringSpec(tasks=("sums",))}
    in_turn = schedule(_spec(2, 2, "in turn").model_copy(update=asked))
    assert [(step.label, len(step.trials), step.is_scored) for step in in_turn] == [
        ("arm0", 4, True),
        ("arm1", 4, True),
    ]
    abba = schedule(_spec(2, 2, "abba").model_copy(update=asked))
    assert [(step.label, len(step.trials), step.is_scored) for step in abba] == [
        ("arm0", 2, False), ("arm1", 2, False), ("arm1", 2, False), ("arm0", 2, False),
        ("arm0", 0, True), ("arm1", 0, True),
    ]  # fmt: skip


def test_what_is_left_is_trials_without_a_result_and_topologies_without_scores() -> None:
    steps = schedule(_spec(2, 1, "in turn").model_copy(update={"eval": ScoringSpec(tasks=("sums",))}))
    trials = steps[0].trials
    left = without(steps, {"arm0": trials, "arm1": trials[:1]}, scored=["arm1"])
    assert [(step.label, step.trials, step.is_scored) for step in left] == [
        ("arm0", (), True),
        ("arm1", trials[1:], False),
    ]
    assert without(steps, {"arm0": trials, "arm1": trials}, scored=["arm0", "arm1"]) == ()


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["in turn", "abba"]), st.data())
def test_every_trial_is_measured_once_and_what_holds_is_not_again(
    arms: int, trials: int, order: str, data: st.DataObject
) -> None:
    spec = _spec(arms, trials, order)
    every = {(label, trial) for label in spec.labels for trial in planned_trials(spec.load)}
    planned = [(step.label, trial) for step in schedule(spec) for trial in step.trials]
    assert len(planned) == len(every) and set(planned) == every
    held = data.draw(st.sets(st.sampled_from(planned)))
    by_label = {label: [trial for one, trial in held if one == label] for label in spec.labels}
    left = without(schedule(spec), by_label)
    assert [(step.label, trial) for step in left for trial in step.trials] == [
        one for one in planned if one not in held
    ]
    assert all(step.trials for step in left)

"""In which order topologies are served and trials measured, and what is left of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtx.bench import planned_trials
from trtx.experiment import load_sweep
from trtx.experiment.schedule import schedule, without
from trtx.experiment.spec import ExperimentSpec


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

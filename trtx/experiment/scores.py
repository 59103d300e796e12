"""Judges a run's scores against the required minimum, and against the same samples of a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.evals import read_eval
from trtx.evals.gate import cell_of, judge_answers, judge_difference, judge_min_score
from trtx.evals.pairs import PairedDifference, TopologyValues, paired_differences, partner_of, read_values
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.runs.forms import LOCK, AskedScores, ComparedScore


def scores_of_run(run_dir: Path) -> tuple[TopologyValues, ...]:
    """The scores of each completely scored topology, in the order of the run."""
    labels = LOCK.read(run_dir, AskedScores).topologies
    return tuple(values for label in labels if (values := read_values(run_dir, label)) is not None)


def partners(labels: Sequence[str], baseline: Sequence[TopologyValues]) -> dict[str, TopologyValues]:
    """The baseline's scores to compare with, by topology; empty if the baseline has no scores."""
    found = {label: partner_of(label, baseline) for label in labels}
    return {label: partner for label, partner in found.items() if partner is not None}


def judge_scores(
    run_dir: Path, labels: Sequence[str], asked: ScoringSpec, others: Mapping[str, TopologyValues], *, whose: str = ""
) -> list[CheckResult]:
    """Judges every topology that should have been scored.

    ``others`` are the scores to compare with, by topology; ``whose`` is appended to their labels in messages.
    """
    judgements: list[CheckResult] = []
    for label in labels:
        scores = read_eval(run_dir, label)
        if scores is None:
            judgements.append(
                CheckResult(
                    cell=label, criterion="scored", verdict=Verdict.FAILED, reason="it was not scored; see the journal"
                )
            )
            continue
        found = [judge_answers(label, task) for task in scores.tasks if not task.subtasks]
        found += [judge_min_score(scores, least) for least in asked.least_scores]
        if (other := others.get(label)) is not None and (values := read_values(run_dir, label)) is not None:
            against = f"{other.topology}{whose}"
            found += [
                judge_difference(label, one, against, asked.max_drop) for one in paired_differences(values, other)
            ]
        doubts = {cell_of(label, task.task): task.doubts for task in scores.tasks}
        judgements += [replace(one, doubts=doubts.get(one.cell, ())) for one in found]
    return judgements


def score_differences(asked: ScoringSpec, values: Sequence[TopologyValues]) -> tuple[str, ...]:
    """Sentences about how the baseline's requests differ from those of this run."""
    shots = {task.num_fewshot for one in values for task in one.tasks}
    before: dict[str, set[Any]] = {
        "endpoint_type": {one.endpoint_type for one in values},
        "limit": {one.limit for one in values},
        "num_fewshot": shots if asked.num_fewshot is not None else set(),
    }
    return tuple(
        f"{name} was {' and '.join(map(str, sorted(found, key=str)))} and is {getattr(asked, name)}"
        for name, found in before.items()
        if found and found != {getattr(asked, name)}
    )


def unjudged(candidate: Sequence[TopologyValues], baseline: Sequence[TopologyValues]) -> tuple[str, ...]:
    """Sentences about the baseline's tasks that this run doesn't include, and that are therefore not judged."""
    asked = {task.task for one in candidate for task in one.tasks}
    dropped = dict.fromkeys(task.task for one in baseline for task in one.tasks if task.task not in asked)
    return (
        tuple(f"{task} was scored there but not in this run, so it is not compared" for task in dropped)
        if candidate
        else ()
    )


def compare_scores(
    candidate: Sequence[TopologyValues], others: Mapping[str, TopologyValues], max_drop: float | None = None
) -> tuple[ComparedScore, ...]:
    """Compares every task of every topology of ``candidate`` with its partner in ``others``.

    With ``max_drop``, each task is judged as by a gate.
    """
    return tuple(
        _compared(values.topology, other.topology, one, max_drop)
        for values in candidate
        if (other := others.get(values.topology)) is not None
        for one in paired_differences(values, other)
    )


def _compared(topology: str, against: str, found: PairedDifference, max_drop: float | None) -> ComparedScore:
    judged = None if max_drop is None else judge_difference(topology, found, against, max_drop)
    return ComparedScore(
        topology=topology,
        against=against,
        task=found.candidate.task,
        metric=found.candidate.metric,
        baseline=None if found.baseline is None else found.baseline.value,
        candidate=found.candidate.value,
        difference=found.interval,
        limit=max_drop,
        verdict=None if judged is None else judged.verdict,
        reason=found.reason if judged is None else judged.reason,
    )

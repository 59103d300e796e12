"""Tasks with JSON schemas: the metrics of an answer, and the comparison of free and constrained requests (two arms).

Every sample of an arm has exactly one outcome: its answer is valid, it is complete but breaks the schema, it was cut,
or the server refused the schema. So the shares of the outcomes add up to 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtx.evals import statistics
from trtx.evals.forms import Arm, ArmDifference, Judged, Sample, SampleRequest, ScoredTask
from trtx.stats.intervals import CONFIDENCE, Interval, per_interval

VALID, PARSES, CORRECT = "schema_compliance", "json_validity", "exact_match"
BROKEN, CUT, REFUSED = "schema_broken", "answer_cut", "schema_refused"
OUTCOMES = (BROKEN, CUT, REFUSED)  # lower values are better
METRICS = (PARSES, VALID, CORRECT, *OUTCOMES)

_SUFFIX = "-constrained"


def outcomes_of(arm: Arm) -> tuple[str, ...]:
    """The metrics that this module adds to an arm's. A free request has no schema that could be refused."""
    return OUTCOMES if arm == "constrained" else (BROKEN, CUT)


def arm_name(task: str, arm: Arm | None) -> str:
    """The name under which an arm is scored. The free arm keeps the task's name, as in runs without arms."""
    return f"{task}{_SUFFIX}" if arm == "constrained" else task


def with_outcome(judgements: Sequence[Judged], answers: Sequence[SampleRequest], arm: Arm) -> tuple[Judged, ...]:
    """The judgements of a sample, with the metrics of its outcome.

    A constrained answer is valid only if its whole text is JSON. The metrics of lm-eval's tasks also accept a code
    block, which a server that ignores the schema may send.
    """
    return tuple(replace(judged, metrics=_metrics(judged.metrics, answers, arm)) for judged in judgements)


def _metrics(found: Mapping[str, Any], answers: Sequence[SampleRequest], arm: Arm) -> dict[str, Any]:
    metrics = dict(found)
    if arm == "constrained" and not all(_is_json(answer.text) for answer in answers):
        metrics |= {name: 0 for name in (PARSES, VALID, CORRECT) if name in metrics}
    valid = bool(metrics.get(VALID))
    refused = any(answer.refusal is not None for answer in answers)
    cut = not valid and not refused and any(answer.finish_reason == "length" for answer in answers)
    outcomes = {BROKEN: int(not (valid or refused or cut)), CUT: int(cut), REFUSED: int(refused)}
    return metrics | {name: outcomes[name] for name in outcomes_of(arm)}


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def arm_differences(tasks: Sequence[ScoredTask], samples: Mapping[str, Sequence[Sample]]) -> tuple[ArmDifference, ...]:
    """constrained − free for each metric of each task that has both arms. ``samples``: by the arm's name.

    The 95 % apply to the intervals of one metric over all tasks together (Bonferroni), as in a comparison with a
    baseline.
    """
    pairs = list(_pairs(tasks, samples))
    confidence = per_interval(CONFIDENCE, max(1, len({task for task, _, _ in pairs})))
    return tuple(_difference(task, metric, found, confidence) for task, metric, found in pairs)


def _pairs(
    tasks: Sequence[ScoredTask], samples: Mapping[str, Sequence[Sample]]
) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """Task, metric, and the values (constrained, free) of each sample that both arms answered."""
    by_name = {task.task: task for task in tasks}
    for free in tasks:
        constrained = by_name.get(arm_name(free.task, "constrained"))
        if free.arm != "free" or constrained is None or not (free.scores and constrained.scores):
            continue
        for score in free.scores:
            now, before = (_values(samples[task.task], score.metric, score.filter) for task in (constrained, free))
            yield free.task, score.name, [(value, before[doc_id]) for doc_id, value in now.items() if doc_id in before]


def _values(samples: Sequence[Sample], metric: str, name: str) -> dict[int, float]:
    return {
        sample.doc_id: float(value)
        for sample in samples
        for judged in sample.judgements
        if judged.filter == name and isinstance(value := judged.metrics.get(metric), (int, float))
    }


def _difference(task: str, metric: str, pairs: Sequence[tuple[float, float]], confidence: float) -> ArmDifference:
    if not pairs:
        return ArmDifference(task, metric, 0, None, "no sample has a value in both arms")
    constrained, free = zip(*pairs, strict=True)
    found = statistics.difference_interval(constrained, free, confidence)
    if isinstance(found, Interval):
        return ArmDifference(task, metric, len(pairs), found, None)
    return ArmDifference(task, metric, len(pairs), None, found.reason)

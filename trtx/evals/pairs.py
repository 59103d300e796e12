"""Per-sample values of a scored topology in compact form, for paired comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.bench.documents import RESTORE
from trtx.config.wording import counted, shown
from trtx.errors import UsageError
from trtx.evals import statistics
from trtx.evals.forms import SAMPLES, Aggregation, Sample, Score, ScoredTask, eval_directory, read_eval, read_whole
from trtx.stats.intervals import CONFIDENCE, Interval, per_interval

Value = float | tuple[float, float]  # a number, or a log-likelihood and its divisor
_DIGITS = 16  # of a sample's key, a hash: 64 bits suffice to distinguish a task's samples


@dataclass(frozen=True, slots=True)
class TaskValues:
    """A group, or a task that isn't in a group, with its first metric, which is used for comparison."""

    task: str
    metric: str
    value: float
    higher_is_better: bool | None
    num_fewshot: int
    samples: dict[str, Value]  # by a prefix of the sample's key; for a group, preceded by the task
    aggregation: Aggregation = "mean"  # how samples become the score
    grading: str | None = None  # as in the scored task; for a group, of all its tasks; None: unknown


@dataclass(frozen=True, slots=True)
class TopologyValues:
    """The values of one scored topology."""

    topology: str  # label
    lm_eval: str  # its version
    endpoint_type: str
    limit: int | None
    tasks: tuple[TaskValues, ...]

    @property
    def shares(self) -> tuple[str, ...]:
        """The scores whose samples are all 0 or 1."""
        return tuple(
            f"{one.metric} of {one.task}"
            for one in self.tasks
            if one.aggregation == "mean" and one.samples and statistics.is_binary(list(one.samples.values()))
        )

    def of(self, task: str) -> TaskValues | None:
        return next((one for one in self.tasks if one.task == task), None)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """candidate − baseline for two scores. ``interval`` None: see ``reason``."""

    candidate: TaskValues
    baseline: TaskValues | None
    interval: Interval | None
    reason: str | None


def read_values(run_dir: Path, topology: str) -> TopologyValues | None:
    """The values of a topology; None if it was not scored completely. Raises UsageError with file, field and value."""
    scores = read_eval(run_dir, topology)
    if scores is None:
        return None
    directory = eval_directory(run_dir, topology)
    compared = [task for task in outermost(scores.tasks) if task.scores]
    answered = {task.task: task.answered for task in scores.tasks}
    grading = {task.task: task.grading for task in scores.tasks}
    tasks = tuple(
        replace(_values(directory, task, task.scores[0], answered), grading=_graded(task, grading)) for task in compared
    )
    return TopologyValues(topology, scores.lm_eval, scores.endpoint_type, scores.limit, tasks)


def _graded(task: ScoredTask, grading: Mapping[str, str | None]) -> str | None:
    known = [found for name in task.subtasks or (task.task,) if (found := grading.get(name)) is not None]
    return "-".join(known) if len(known) == len(task.subtasks or (task.task,)) else None


def partner_of(topology: str, others: Sequence[TopologyValues]) -> TopologyValues | None:
    """The same topology's values, else the first ones; None if there are none."""
    return next((one for one in others if one.topology == topology), others[0] if others else None)


def paired_differences(candidate: TopologyValues, baseline: TopologyValues) -> tuple[PairedDifference, ...]:
    """Paired differences of every task of ``candidate``. The 95 % apply to all intervals together (Bonferroni)."""
    confidence = per_interval(CONFIDENCE, max(1, len(candidate.tasks)))
    found = []
    for task in candidate.tasks:
        before = baseline.of(task.task)
        interval, reason = None, _why_not_paired(candidate, baseline, task, before)
        if reason is None and before is not None:
            of_pairs = _difference(task, before, confidence)
            if isinstance(of_pairs, Interval):
                interval = of_pairs
            else:
                reason = of_pairs.reason
        found.append(PairedDifference(task, before, interval, reason))
    return tuple(found)


def by_key(samples: Sequence[Sample], score: Score) -> dict[str, Value]:
    """A metric's value by sample key, for samples with a value of their own. Rows with equal requests are numbered."""
    found: dict[str, Value] = {}
    seen: Counter[str] = Counter()
    for sample in samples:
        for judged in sample.judgements:
            value = _value(judged.metrics.get(score.metric), score)
            if judged.filter == score.filter and value is not None:
                twins = seen[sample.key]
                found[f"{sample.key}#{twins}" if twins else sample.key] = value
                seen[sample.key] += 1
    return found


def _value(found: Any, score: Score) -> Value | None:
    if score.aggregation == "mean":
        return float(found) if isinstance(found, (int, float)) else None
    if score.aggregation == "other" or not isinstance(found, (list, tuple)) or len(found) != 2:
        return None
    if not all(isinstance(one, (int, float)) for one in found):
        return None
    return float(found[0]), float(found[1])


def _why_not_paired(
    candidate: TopologyValues, baseline: TopologyValues, task: TaskValues, before: TaskValues | None
) -> str | None:
    if candidate.lm_eval != baseline.lm_eval:
        return (
            f"the baseline was scored by lm-eval {baseline.lm_eval}, and this run by {candidate.lm_eval}; score both "
            "by the same"
        )
    if before is None:
        return f"{baseline.topology} of the baseline has no score of {task.task}; score both by the same tasks"
    if before.metric != task.metric:
        return f"the first metric of {task.task} was {before.metric} and is {task.metric}; score both by the same task"
    if task.aggregation == "other" or not task.samples:
        return f"{task.metric} is computed over all samples at once, so no sample has a value to pair"
    shared = len(task.samples.keys() & before.samples.keys())
    if shared < max(len(task.samples), len(before.samples)):
        return (
            f"{counted(shared, 'sample')} in both runs, of {len(task.samples)} here and {len(before.samples)} in "
            f"{baseline.topology} of the baseline; expected the same samples; ask both the same tasks, limit "
            "and few-shot examples"
        )
    if None not in (task.grading, before.grading) and task.grading != before.grading:
        return (
            f"{task.task} was graded in another way then: its targets, filters or metrics have changed; score both by "
            "the same task"
        )
    return None


def _difference(candidate: TaskValues, baseline: TaskValues, confidence: float) -> Interval | statistics.NoInterval:
    """The interval of paired differences, according to the score's aggregation; else why there is none."""
    now, before = list(candidate.samples.values()), [baseline.samples[key] for key in candidate.samples]
    if candidate.aggregation == "mean":
        return statistics.difference_interval(_numbers(now), _numbers(before), confidence)
    return statistics.ratio_difference_interval(_ratios(now), _ratios(before), candidate.aggregation, confidence)


def _numbers(values: Sequence[Value]) -> list[float]:
    return [value for value in values if isinstance(value, float)]


def _ratios(values: Sequence[Value]) -> list[tuple[float, float]]:
    return [value for value in values if isinstance(value, tuple)]


def outermost(tasks: Sequence[ScoredTask]) -> list[ScoredTask]:
    """Groups, and tasks that aren't in a group."""
    inner = {name for task in tasks for name in task.subtasks}
    return [task for task in tasks if task.task not in inner]


def _refuse_no_number(directory: Path, samples: Sequence[Sample], score: Score) -> None:
    for number, sample in enumerate(samples, start=1):
        for judged in sample.judgements:
            if judged.filter == score.filter and score.metric in judged.metrics:
                found = judged.metrics[score.metric]
                if _value(found, score) is None:
                    expected = "a number" if score.aggregation == "mean" else "two numbers"
                    raise UsageError(
                        f"{directory / SAMPLES.file}, line {number}: {score.metric} is {shown(json.dumps(found))}; "
                        f"expected {expected}, as it was scored; {RESTORE}"
                    )


def _values(directory: Path, task: ScoredTask, score: Score, answered: Mapping[str, int]) -> TaskValues:
    samples = dict(_of_samples(directory, task, score, answered))
    return TaskValues(
        task.task, score.name, score.value, score.higher_is_better, task.num_fewshot, samples, score.aggregation
    )


def _of_samples(
    directory: Path, task: ScoredTask, score: Score, answered: Mapping[str, int]
) -> Iterator[tuple[str, Value]]:
    """Values by key. ``answered``: counts by task. Raises UsageError for a file with another count, or without a
    number.
    """
    for name in task.subtasks or (task.task,):
        samples = read_whole(directory / name, answered[name])
        if score.aggregation != "other":
            _refuse_no_number(directory / name, samples, score)
        for key, value in by_key(samples, score).items():
            digest, twins, number = key.partition("#")
            yield f"{name}/" * bool(task.subtasks) + digest[:_DIGITS] + twins + number, value

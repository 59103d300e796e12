"""Turns answers into judgements and scores, using lm-eval's filters, metrics and aggregation, and trtx's intervals."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import bits_per_byte, mean, weighted_perplexity
from lm_eval.api.task import Task

from trtx.evals import statistics, structured
from trtx.evals.forms import Aggregation, Judged, Sample, SampleRequest, Score, ScoredTask
from trtx.evals.session.loaded_tasks import TaskDocument
from trtx.stats.intervals import Interval

_RATIOS: dict[Any, Aggregation] = {weighted_perplexity: "weighted_perplexity", bits_per_byte: "bits_per_byte"}
_OF_ALL_AT_ONCE = "its tasks compute this metric over all samples at once, so no sample has a value to draw"
_GRADING = ("filter_list", "metric_list", "process_results")  # keys of a task's config
_DIGITS = 16  # of a hash
Values = dict[tuple[str, str], list[Any]]  # (metric, filter) → values per sample


class NoNumber(Exception):
    """A metric returned a value that can't be averaged."""


def judge(
    task: Task, documents: Sequence[TaskDocument], asked: Sequence[Sequence[SampleRequest]]
) -> list[tuple[Judged, ...]]:
    """The judgements of each document, by filter. ``asked``: its requests with their repeats, in the order of
    asking.
    """
    instances = []
    for document, answers in zip(documents, asked, strict=True):
        left = list(answers)
        for instance in document.instances:
            one = copy.copy(instance)
            count = instance.repeats or 1
            one.resps, one.filtered_resps = [answer.response for answer in left[:count]], {}
            del left[:count]
            instances.append(one)
    for ensemble in task._filters:  # like Task.apply_filters, but only for these instances
        ensemble.apply(instances)
    judged, at = [], 0
    for document in documents:
        own = instances[at : at + len(document.instances)]
        at += len(own)
        judged.append(
            tuple(
                _judged(task, document, name, [one.filtered_resps[name] for one in own])
                for name in own[0].filtered_resps
            )
        )
    return judged


def _judged(task: Task, document: TaskDocument, name: str, responses: list[Any]) -> Judged:
    """Metrics in the order of the task's config; the first is the one used for comparison."""
    found = {metric: plain(value) for metric, value in task.process_results(document.doc, responses).items()}
    ordered = [*(metric for metric in task.aggregation() if metric in found), *found]
    return Judged(name, tuple(map(plain, responses)), {metric: found[metric] for metric in ordered})


def plain(value: Any) -> Any:
    """JSON values for those of numpy and similar libraries; infinities and NaN become their names."""
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict)):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def grading(task: Task, documents: Sequence[TaskDocument]) -> str | None:
    """A hash of the targets, filters and metrics, which determine the value of an answer but aren't in its requests.

    None if the task's code fails to return a target.
    """
    try:
        told = [plain(task.doc_to_target(document.doc)) for document in documents]
    except Exception:  # raised by the task's code
        return None
    rules = {name: _told(task.get_config(name)) for name in _GRADING}
    return hashlib.sha256(json.dumps([rules, told], sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]


def _told(value: Any) -> Any:
    """A config value for hashing; functions are replaced with their source, which is the same in every process."""
    if isinstance(value, dict):
        return {str(name): _told(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    if not callable(value):
        return plain(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # for example a built-in function
        return getattr(value, "__qualname__", type(value).__qualname__)


def values_of(samples: Sequence[Sample]) -> Values:
    found: Values = {}
    for sample in samples:
        for judged in sample.judgements:
            for metric, value in judged.metrics.items():
                found.setdefault((metric, judged.filter), []).append(value)
    return found


def scores(task: Task, samples: Sequence[Sample]) -> tuple[Score, ...]:
    """Scores in the task's order. Raises NoNumber that names the sample."""
    return tuple(_score(task, metric, name, values, samples) for (metric, name), values in values_of(samples).items())


def _score(task: Task, metric: str, name: str, values: list[Any], samples: Sequence[Sample]) -> Score:
    aggregate = task.aggregation().get(metric, mean)
    is_outcome = metric in structured.OUTCOMES
    better = False if is_outcome else task.higher_is_better().get(metric)
    chance = None if is_outcome else _chance(task, metric, samples)
    if aggregate is mean:
        for value, sample in zip(values, samples, strict=True):
            if not isinstance(value, (int, float)):
                raise NoNumber(
                    f"metric {metric} of sample {sample.doc_id} is {value!r}, expected a number; its answer is in "
                    "samples.jsonl"
                )
        kind = "binomial" if statistics.is_binary(values) else "bootstrap"
        return _made(metric, name, statistics.score_interval(values), mean(values), kind, better, chance)
    # process_results returns tuples, JSON has lists; aggregations accept both.
    value = float(aggregate(values))
    if not math.isfinite(value):
        raise NoNumber(f"metric {metric} is {value} over {len(values)} samples, expected a number")
    interval = statistics.bootstrap_interval(
        values, lambda drawn: float(aggregate(drawn)), resamples=statistics.SLOW_RESAMPLES
    )
    aggregation = _RATIOS.get(aggregate, "other")
    return replace(_made(metric, name, interval, value, "bootstrap", better, chance), aggregation=aggregation)


def _chance(task: Task, metric: str, samples: Sequence[Sample]) -> float | None:
    """The score of guessing: as specified by the task, or from the number of choices."""
    if (chance := (task.get_config("metadata") or {}).get("chance")) is not None:
        return float(chance)
    if task.OUTPUT_TYPE != "multiple_choice" or metric not in ("acc", "acc_norm", "acc_bytes"):
        return None
    return fmean(1 / len(sample.requests) for sample in samples)


def _made(
    metric: str,
    name: str,
    found: Interval | statistics.NoInterval,
    value: float,
    kind: Any,
    better: Any,
    chance: Any,
) -> Score:
    interval, reason = (None, found.reason) if isinstance(found, statistics.NoInterval) else (found, None)
    return Score(
        metric=metric, filter=name, interval=interval, value=float(value), kind=kind, higher_is_better=better,
        chance=chance, no_interval=reason,
    )  # fmt: skip


def group_scores(group: Group, tasks: dict[str, ScoredTask], samples: dict[str, Sequence[Sample]]) -> ScoredTask | None:
    """Scores of a group with lm-eval's weighting; None for a group without an aggregation."""
    own = [task.task_name for task in group.get_all_tasks()]
    if not group.has_aggregation or any(name not in tasks for name in own):
        return None
    members = [tasks[name] for name in own]
    if lacking := [one.task for one in members if not one.scores]:
        return _group(group, members, (), f"{', '.join(lacking)} has no score")
    told = {
        one.task: {
            "sample_len": one.answered, **{f"{score.metric},{score.filter}": score.value for score in one.scores},
        }
        for one in members
    }  # fmt: skip
    aggregated = group.aggregate(told)
    found = []
    for key, value in aggregated.items():
        metric, _, name = key.partition(",")
        if not name or not isinstance(value, float) or metric.endswith("_stderr"):
            continue
        weighted = any(
            config.metric == metric and config.weight_by_size for config in group.aggregate_metric_list or ()
        )
        strata = [values_of(samples[one.task]).get((metric, name), []) for one in members]
        found.append(_group_score(metric, name, value, strata, weighted, members))
    return _group(group, members, tuple(found), None)


def _group_score(
    metric: str, name: str, value: float, strata: list[list[Any]], weighted: bool, members: Sequence[ScoredTask]
) -> Score:
    all_values = [one for values in strata for one in values]
    better = next((s.higher_is_better for one in members for s in one.scores if s.metric == metric), None)
    if weighted and statistics.is_binary(all_values):
        return _made(metric, name, statistics.score_interval(all_values), value, "binomial", better, None)
    numbers = all(isinstance(one, (int, float)) for one in all_values)
    total = len(all_values) or 1
    weights = [len(values) / total if weighted else 1 / len(strata) for values in strata]
    interval = statistics.strata_interval(strata, weights) if numbers else statistics.NoInterval(_OF_ALL_AT_ONCE)
    return _made(metric, name, interval, value, "bootstrap", better, None)


def _group(group: Group, members: Sequence[ScoredTask], found: tuple[Score, ...], note: str | None) -> ScoredTask:
    return ScoredTask(
        task=group.name,
        output_type="group",
        version=None if group.version is None else str(group.version),
        num_fewshot=members[0].num_fewshot if members else 0,
        samples=sum(one.samples for one in members),
        answered=sum(one.answered for one in members),
        scores=found,
        unanswered=(),
        note=note,
        subtasks=tuple(one.task for one in members),
        doubts=tuple(dict.fromkeys(doubt for one in members for doubt in one.doubts)),
    )

"""Service level objectives: bounds for a cell's metrics, and their judgement.

An objective is a promise about the measurement, so the metric itself, over all requests of all trials, is compared with
the bound, as in aiperf. Nothing counts as met without a measurement: a missing metric, or a percentile of too few
requests, meets no objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import ge, gt, le, lt
from typing import Literal, get_args

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import CheckResult, UnjudgedValue, Verdict, doubts, why_not_judged
from trtx.bench.judge.sample import CellSample, MetricColumn, parse_metric
from trtx.bench.metrics import request_error_rate, uncounted_request_count
from trtx.errors import UsageError
from trtx.stats.intervals import mean_interval

Operator = Literal["lt", "le", "gt", "ge"]
_HOLDS: Mapping[str, Callable[[float, float], bool]] = {"lt": lt, "le": le, "gt": gt, "ge": ge}
_WORDS = {"lt": "below", "le": "at most", "gt": "above", "ge": "at least"}
_ASKS_FOR = {"lt": "lower", "le": "lower", "gt": "higher", "ge": "higher"}


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound for a number."""

    operator: Operator
    threshold: float
    unit: str

    def holds(self, value: float) -> bool:
        return _HOLDS[self.operator](value, self.threshold)

    def __str__(self) -> str:
        return f"{_WORDS[self.operator]} {self.threshold:.10g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective such as ``time_to_first_token:p99:le:500``; the threshold is in the metric's unit."""

    metric: MetricColumn
    bound: Bound

    @property
    def name(self) -> str:
        return f"{self.metric.name}:{self.bound.operator}:{self.bound.threshold:.10g}"


def parse_objective(text: str) -> Objective:
    """Parses ``metric:statistic:operator:value``, the format of aiperf 0.13.0's ``--search-sla``. Raises UsageError.

    Metrics and statistics are those of trtx. Objectives that aiperf would accept but that can only be mistakes are
    refused: an operator that requires a high latency, or a bound that every value or no value satisfies.
    """
    parts = text.split(":")
    if len(parts) != 4:
        raise UsageError(
            f"--slo {text}: it has {len(parts)} of 4 parts; expected metric:statistic:operator:value, such as "
            "time_to_first_token:p99:le:500"
        )
    name, statistic, operator, value = parts
    metric = parse_metric(f"{name}:{statistic}", f"--slo {text}")
    threshold = _number(value)
    if threshold is None:
        raise UsageError(f"--slo {text}: {value!r} is not a number; expected one in {metric.unit}, such as 500")
    bound = Bound(_operator(operator, metric, text), threshold, metric.unit)
    if threshold < 0 or (threshold == 0 and bound.operator in ("lt", "ge")):
        sense = "kept" if bound.operator in ("lt", "le") else "missed"
        raise UsageError(f"--slo {text}: no metric is below 0, so it could never be {sense}; expected a value above 0")
    return Objective(metric, bound)


def _operator(typed: str, metric: MetricColumn, text: str) -> Operator:
    better = metric.metric.better
    sound: list[Operator] = [known for known in get_args(Operator) if better in (None, _ASKS_FOR[known])]
    for known in sound:
        if typed == known:
            return known
    fault = (
        f"{metric.metric.name} is better when {better}, but {typed} requires the opposite"
        if typed in _HOLDS
        else f"there is no operator {typed!r}"
    )
    raise UsageError(f"--slo {text}: {fault}; expected {' or '.join(sound)}")


def judge_objective(sample: CellSample, objective: Objective) -> CheckResult:
    """Judges one cell: PASS or MISSED; FAILED if no request was answered; NO_VERDICT if too little was measured."""
    metric, bound = objective.metric, objective.bound
    if refusal := why_not_judged(sample) or _why_not_known(sample, objective):
        return refusal.of(sample, objective.name, doubts(sample))
    return judge_bound(sample, objective.name, bound, sample.value(metric), sample.values(metric))


def judge_error_rate(sample: CellSample, limit: float = 0.0) -> CheckResult:
    """Judges one cell: compares its failed requests, in % of all, with the permitted maximum.

    This includes INVALID cells, because a failed request has failed whatever disturbed the load.
    """
    sample = replace(sample.whole, validity=ValidityLevel.VALID)
    return judge_objective(sample, Objective(MetricColumn(request_error_rate, None), Bound("le", limit, "%")))


def judge_bound(
    sample: CellSample, criterion: str, bound: Bound, value: float | None, trials: Sequence[float | None]
) -> CheckResult:
    """Compares a cell's value, and the value of each trial, with a bound. The cell must be fit for judgement."""
    of_trials = [of_trial for of_trial in trials if of_trial is not None]
    if value is None:
        return UnjudgedValue(Verdict.NO_VERDICT, _why_none(sample)).of(sample, criterion, doubts(sample))
    interval = mean_interval(of_trials) if len(of_trials) == len(trials) else None
    holds = bound.holds(value)
    is_near = interval is not None and interval.low < bound.threshold < interval.high
    return CheckResult(
        cell=sample.cell,
        criterion=criterion,
        verdict=Verdict.PASS if holds else Verdict.MISSED,
        reason=f"{value:.6g} {bound.unit}{sample.where}, "
        + (f"{bound}" if holds else f"expected {bound}")
        + ("; the bound lies within the spread of the trials" if is_near else ""),
        doubts=doubts(sample),
        value=value,
        interval=interval,
        limit=bound.threshold,
        unit=bound.unit,
        is_near=is_near,
    )


def _why_not_known(sample: CellSample, objective: Objective) -> UnjudgedValue | None:
    metric = objective.metric
    succeeded, failed = sample.requests()
    if succeeded + failed == 0:
        return UnjudgedValue(Verdict.NO_VERDICT, "no request was measured; expected at least one")
    value = sample.value(metric)
    if value is None:
        if failed and not succeeded:
            return UnjudgedValue(Verdict.FAILED, f"all {failed} requests failed; expected answers")
        return UnjudgedValue(
            Verdict.NO_VERDICT, sample.lacks_device(metric) or sample.lacks_readings(metric) or _why_none(sample)
        )
    if sample.supports(metric):
        return None
    if missed := _missed_already(sample, objective):
        return UnjudgedValue(Verdict.MISSED, missed)
    return UnjudgedValue(
        Verdict.NO_VERDICT,
        f"{metric.statistic} needs {metric.samples_needed} requests, but there are {sample.count(metric)}; "
        "measure more, or judge a smaller percentile",
    )


def _missed_already(sample: CellSample, objective: Objective) -> str | None:
    """A clause if a smaller percentile with enough requests already misses the bound: the requested one can't
    be lower.
    """
    asked, bound = objective.metric, objective.bound
    if _ASKS_FOR[bound.operator] != "lower":
        return None
    for smaller in (replace(asked, column=column) for column in asked.metric.columns if column is not None):
        value = sample.value(smaller)  # a larger percentile needs even more requests
        if sample.supports(smaller) and value is not None and not bound.holds(value):
            return f"{smaller.statistic} is {value:.6g} {bound.unit}{sample.where} already; expected {bound}"
    return None


def _why_none(sample: CellSample) -> str:
    uncounted = 0 if sample.figures is None else sample.figures[uncounted_request_count]
    if uncounted:
        return f"{uncounted} answers carry no usage, so their tokens were not counted; switch usage on at the server"
    return "it can't be computed from these answers"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

"""Verdicts on scores: minimum scores, and paired differences from a baseline, each judged by its confidence interval.

A verdict is PASS if the whole interval satisfies the bound, a failure if no part of it does, and otherwise NO_VERDICT,
which more samples would resolve. An unanswered sample fails its task, whatever the scores are. The check of a minimum
score reaches a verdict only if the verdict is the same for every score that the unanswered samples could have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.config.wording import counted, quoted
from trtx.errors import UsageError
from trtx.evals import statistics
from trtx.evals.forms import Score, ScoredTask, TopologyScores
from trtx.evals.pairs import PairedDifference
from trtx.stats.intervals import Interval

_ASK_AGAIN = "ask for them again with --resume"
UNANSWERED = "unanswered_sample_count"
DEFAULT_MAX_DROP = 0.02  # for a score between 0 and 1: two answers in a hundred


@dataclass(frozen=True, slots=True)
class MinScore:
    """A minimum such as ``gsm8k:exact_match:0.8``. For a metric whose lower values are better, it is a maximum."""

    task: str
    metric: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.task}:{self.metric}:{self.value:.10g}"


def parse_min_score(text: str) -> MinScore:
    """Parses ``task:metric:value``. Raises UsageError."""
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or not all(parts):
        raise UsageError(f"--min-score {quoted(text)}: expected task:metric:value, such as gsm8k:exact_match:0.8")
    try:
        value = float(parts[2])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--min-score {quoted(text)}: {quoted(parts[2])} is not a number; expected for example 0.8")
    return MinScore(parts[0], parts[1], value)


def judge_answers(topology: str, task: ScoredTask) -> CheckResult:
    """Judges whether every sample was answered and the task was scored."""
    criterion = f"{UNANSWERED}:avg:le:0"
    cell = cell_of(topology, task.task)
    missing = task.samples - task.answered
    if task.note is not None and not task.unanswered:
        return CheckResult(cell=cell, criterion=criterion, verdict=Verdict.NO_VERDICT, reason=task.note)
    told = "; ".join(map(str, task.unanswered[:3]))
    reason = (
        f"{missing} of {counted(task.samples, 'sample')} without an answer: {told}"
        if missing
        else "every sample has its answer"
    )
    if task.note is not None:  # why the answered samples have no score either
        reason += f"; {task.note}"
    return CheckResult(
        cell=cell, criterion=criterion, verdict=Verdict.FAILED if missing else Verdict.PASS, reason=reason,
        value=missing, limit=0, unit="samples",
    )  # fmt: skip


def check_min_scores(
    least: Sequence[MinScore], metrics: Mapping[str, Sequence[str]], shares: Mapping[str, Sequence[str]]
) -> None:
    """Raises UsageError for a minimum of an unrequested task or an unknown metric, and for a value no score can have.

    ``metrics``: each task's metric names. ``shares``: the names among them whose scores lie between 0 and 1.
    """
    for one in least:
        if one.task not in metrics:
            raise UsageError(
                f"--min-score {one.name}: {one.task} is not among the tasks; expected one of {', '.join(metrics)}"
            )
        known = metrics[one.task]
        if one.metric.partition(",")[0] not in known:
            raise UsageError(
                f"--min-score {one.name}: {one.metric} is not a metric of {one.task}; expected one of "
                f"{', '.join(known)}"
            )
        if one.metric.partition(",")[0] in shares.get(one.task, ()) and not 0 <= one.value <= 1:
            raise UsageError(
                f"--min-score {one.name}: {one.metric} lies between 0 and 1, expected such a value, as 0.8"
            )


def check_max_drop(max_drop: float, shares: Sequence[str]) -> None:
    """Raises UsageError for a drop that a score between 0 and 1 can't have, since the check could never fail.

    ``shares``: names of scores between 0 and 1.
    """
    if not (max_drop > 0 and math.isfinite(max_drop)):
        raise UsageError(f"--max-drop is {max_drop:g}; expected a number above 0, such as {DEFAULT_MAX_DROP:g}")
    if max_drop >= 1 and shares:
        raise UsageError(
            f"--max-drop is {max_drop:g}, and {shares[0]} lies between 0 and 1, so no score could be that much worse; "
            f"expected a value such as {DEFAULT_MAX_DROP:g}, for two answers in a hundred. Compare tasks with other "
            "metrics in a separate run"
        )


def judge_min_score(scores: TopologyScores, least: MinScore) -> CheckResult:
    """Judges the task that ``least`` names."""
    task = next(one for one in scores.tasks if one.task == least.task)
    score = _named(task, least.metric)
    cell, criterion = cell_of(scores.topology, task.task), f"{least.metric}:score:{_operator(score)}:{least.value:.10g}"
    if score is None:
        return _unknown(cell, criterion, f"{task.task} has no such score ({task.note or 'no sample was answered'})")
    if score.interval is None:
        return _unknown(
            cell,
            criterion,
            score.no_interval or f"{counted(task.answered, 'sample')}, too few for an interval; ask more",
        )
    interval = _with_lost(score, task)
    if interval is None:
        return _unknown(
            cell, criterion, f"{_lost(task)}, so {score.metric} over all samples is not known; {_ASK_AGAIN}"
        )
    sign = -1 if score.higher_is_better is False else 1
    low, high = sorted((sign * interval.low, sign * interval.high))
    verdict = _three_way(low, high, sign * least.value, Verdict.MISSED)
    bound = f"{'at most' if sign < 0 else 'at least'} {least.value:g}"
    reason = _sentence(interval, bound, verdict)
    if task.answered < task.samples:
        reason = f"{_lost(task)}; with each of them counted as 0, and as 1: {reason}"
        reason += f"; {_ASK_AGAIN}" if verdict is Verdict.NO_VERDICT else ""
    return CheckResult(
        cell=cell, criterion=criterion, verdict=verdict, reason=reason,
        value=score.value, interval=interval, limit=least.value,
        is_near=verdict is Verdict.NO_VERDICT,
    )  # fmt: skip


def _lost(task: ScoredTask) -> str:
    return f"{task.samples - task.answered} of {counted(task.samples, 'sample')} without an answer"


def _with_lost(score: Score, task: ScoredTask) -> Interval | None:
    """The score's interval, widened to cover two cases: all unanswered samples score 0, or all score 1.

    None if samples are unanswered and a sample's value may be something other than 0 or 1.
    """
    lost = task.samples - task.answered
    if not lost or score.interval is None:
        return score.interval
    if score.kind != "binomial":
        return None
    ones = round(score.value * task.answered)
    worst, best = (
        statistics.share_interval([1] * count + [0] * (task.samples - count), score.interval.confidence)
        for count in (ones, ones + lost)
    )
    assert worst is not None and best is not None
    return Interval(score.value, worst.low, best.high, score.interval.confidence)


def judge_difference(topology: str, found: PairedDifference, against: str, max_drop: float) -> CheckResult:
    """Judges a paired difference. ``against``: name of the baseline."""
    task = found.candidate
    cell, criterion = cell_of(topology, task.task), f"{task.metric}:drop:le:{max_drop:.10g}"
    interval = found.interval
    if interval is None:
        return _unknown(cell, criterion, found.reason or "there is no interval")
    sign = -1 if task.higher_is_better is False else 1
    low, high = sorted((sign * interval.low, sign * interval.high))
    verdict = _three_way(low, high, -max_drop, Verdict.REGRESSED)
    return CheckResult(
        cell=cell, criterion=criterion, verdict=verdict,
        reason=f"against {against} {_sentence(interval, f'at most {max_drop:g} worse', verdict, signed=True)}",
        value=interval.estimate, interval=interval, limit=max_drop,
        is_near=verdict is Verdict.NO_VERDICT,
    )  # fmt: skip


def _named(task: ScoredTask, metric: str) -> Score | None:
    """The score of a metric such as ``exact_match,strict-match``; without a filter in its name, the first filter's."""
    found = (score for score in task.scores if metric in (score.name, score.metric, f"{score.metric},{score.filter}"))
    return next(found, None)


def cell_of(topology: str, task: str) -> str:
    return f"{topology}-{task}"


def _operator(score: Score | None) -> str:
    return "le" if score is not None and score.higher_is_better is False else "ge"


def _three_way(low: float, high: float, bound: float, bad: Verdict) -> Verdict:
    if low >= bound:
        return Verdict.PASS
    return bad if high < bound else Verdict.NO_VERDICT


def _sentence(interval: Interval, bound: str, verdict: Verdict, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    told = f"{interval.estimate:{sign}.4g} ({interval.low:{sign}.4g} to {interval.high:{sign}.4g})"
    if verdict is Verdict.PASS:
        return f"{told}, {bound}"
    if verdict is Verdict.NO_VERDICT:
        return f"{told}, and the bound ({bound}) lies within the interval; ask more samples"
    return f"{told}, expected {bound}"


def _unknown(cell: str, criterion: str, reason: str) -> CheckResult:
    return CheckResult(cell=cell, criterion=criterion, verdict=Verdict.NO_VERDICT, reason=reason)

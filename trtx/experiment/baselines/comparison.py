"""Compares two runs or baselines: the differences in their conditions, and the ratio of each metric of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtx.bench.judge.judgement import CheckResult, UnjudgedValue, Verdict
from trtx.bench.judge.regression import DEFAULT_METRICS, GateLimit, compare, doubts_of_both, measured_ratio
from trtx.bench.judge.sample import CellSample, MetricColumn, Window
from trtx.errors import UsageError
from trtx.evals.gate import check_max_drop
from trtx.experiment.baselines.baseline import Baseline, records_unchecked
from trtx.experiment.baselines.conditions import differences, load_differences, refuse_others, unchecked
from trtx.experiment.bench.verdict import unmeasured
from trtx.experiment.scores import compare_scores, partners, unjudged
from trtx.runs.forms import ComparedMetric, Comparison, Difference
from trtx.stats.intervals import CONFIDENCE, Interval, per_interval

Sides = tuple[CellSample | None, CellSample | None]  # baseline and candidate of one cell
Rounds = Sequence[tuple[float | None, float | None]]


def compare_measured(
    baseline: Baseline,
    candidate: Baseline,
    metrics: Sequence[MetricColumn] = DEFAULT_METRICS,
    *,
    max_error_rate: float = 0.0,
    limit: GateLimit | None = None,
    allowed: Sequence[str] = (),
    window: Window = "whole",
    max_drop: float | None = None,
) -> Comparison:
    """Compares every cell that either side has, and every task that ``candidate`` has.

    The confidence of 95 % applies to all intervals of metrics together (Bonferroni), and to all score intervals of one
    topology together.

    With a ``limit``, the cells of ``candidate`` are judged as by a gate, including requested cells without a result.
    UsageError is raised if the two sides differ in model, load or machine and the difference is not ``allowed``. With
    ``max_drop``, scores are judged. Without either, differences are only reported, and UsageError is raised only if the
    two sides have nothing in common.
    """
    _refuse_nothing_in_common(baseline, candidate, limit, max_drop)
    has_speed = bool(baseline.cells and candidate.cells)
    if max_drop is not None:
        check_max_drop(max_drop, [name for one in candidate.scores for name in one.shares])
    found = _differences(baseline, candidate)
    rows = _speed(baseline, candidate, found, metrics, max_error_rate, limit, allowed, window) if has_speed else []
    others = partners([one.topology for one in candidate.scores], baseline.scores)
    return Comparison(
        baseline.name, candidate.name, found, unchecked(baseline.conditions, candidate.conditions), tuple(rows), window,
        compare_scores(candidate.scores, others, max_drop),
        (*_one_sided(baseline, candidate), *_unjudged(baseline, candidate, limit, max_drop)),
        records_unchecked(baseline, candidate),
    )  # fmt: skip


def _refuse_nothing_in_common(
    baseline: Baseline, candidate: Baseline, limit: GateLimit | None, max_drop: float | None
) -> None:
    both = (baseline, candidate)
    without_speed = [one.name for one in both if not one.cells]
    without_scores = [one.name for one in both if not one.scores]
    if limit is not None and without_speed:
        raise UsageError(
            f"{without_speed[0]} is a run of trtx eval, which measures no speed, but --max-regression judges "
            "speed; leave it out, or compare runs of trtx bench"
        )
    if max_drop is not None and without_scores:
        raise UsageError(
            f"{without_scores[0]} has no scores, but --max-drop judges scores; leave it out, or name runs with scores"
        )
    if max_drop is not None and candidate.unscored:
        raise UsageError(
            f"{candidate.name} has no scores of {', '.join(candidate.unscored)}, because it ended early, but "
            "--max-drop judges scores; leave it out, or resume that run first"
        )
    if without_speed and without_scores:
        raise UsageError(
            f"{without_speed[0]} has only scores and {without_scores[0]} has only speed, so they can't be compared; "
            "name two runs of the same kind"
        )


def _one_sided(baseline: Baseline, candidate: Baseline) -> Iterator[str]:
    for one, other in ((baseline, candidate), (candidate, baseline)):
        if one.cells and not other.cells:
            yield f"Speed is not compared: {other.name} measured none."
        if one.scores and not other.scores:
            yield f"Scores are not compared: {other.name} has none."


def _unjudged(
    baseline: Baseline, candidate: Baseline, limit: GateLimit | None, max_drop: float | None
) -> Iterator[str]:
    """Notes about what only the baseline has, if something is judged. Without a limit, such cells have rows of their
    own.
    """
    asked = {*candidate.loads, *candidate.unmeasured}
    if limit is not None and (alone := [cell.name for cell in baseline.cells if cell.name not in asked]):
        yield f"Not judged: {', '.join(alone)}, which {candidate.name} was not asked to measure."
    if max_drop is not None:
        yield from (f"Not judged: {sentence}." for sentence in unjudged(candidate.scores, baseline.scores))


def _differences(baseline: Baseline, candidate: Baseline) -> tuple[Difference, ...]:
    found = differences(baseline.conditions, candidate.conditions)
    return (*found, *load_differences(baseline.cells, candidate.loads))


def _speed(
    baseline: Baseline,
    candidate: Baseline,
    found: Sequence[Difference],
    metrics: Sequence[MetricColumn],
    max_error_rate: float,
    limit: GateLimit | None,
    allowed: Sequence[str],
    window: Window,
) -> list[ComparedMetric]:
    sides = _by_cell(baseline, window), _by_cell(candidate, window)
    if limit is not None:
        refuse_others(baseline.name, found, allowed)
        by_name = {metric.name: metric for metric in metrics}
        of_baseline, of_candidate = (
            tuple(sides[0].values()),
            [*sides[1].values(), *map(unmeasured, candidate.unmeasured)],
        )
        judgements = compare(of_baseline, of_candidate, limit, metrics, max_error_rate=max_error_rate)
        rows = [
            judged(one.cell, by_name[one.criterion], (sides[0].get(one.cell), sides[1].get(one.cell)), one, limit)
            for one in judgements
        ]
    else:
        cells = tuple(dict.fromkeys((*sides[0], *sides[1], *baseline.unmeasured, *candidate.unmeasured)))
        confidence = per_interval(CONFIDENCE, max(1, len(cells) * len(metrics)))
        rows = []
        for cell in cells:
            of_both = sides[0].get(cell), sides[1].get(cell)
            for metric in metrics:
                ratio = (
                    UnjudgedValue(Verdict.NO_VERDICT, f"{candidate.name} has no such cell")
                    if of_both[1] is None
                    else measured_ratio(
                        of_both[0], of_both[1], metric, max_error_rate=max_error_rate, confidence=confidence
                    )
                )
                rows.append(measured(cell, metric, of_both, ratio))
    return rows


def measured(
    cell: str, metric: MetricColumn, sides: Sides, ratio: Interval | UnjudgedValue, *, rounds: Rounds = ()
) -> ComparedMetric:
    """A metric that was not judged: its ratio, or why there is none."""
    found, reason = (None, ratio.reason) if isinstance(ratio, UnjudgedValue) else (ratio, None)
    return ComparedMetric(
        cell, metric.name, *_values(sides, metric), _unit(sides, metric), found, None, None, reason,
        doubts_of_both(*sides), tuple(rounds),
    )  # fmt: skip


def judged(
    cell: str, metric: MetricColumn, sides: Sides, judgement: CheckResult, limit: GateLimit, *, rounds: Rounds = ()
) -> ComparedMetric:
    """A metric with the gate's judgement."""
    return ComparedMetric(
        cell, metric.name, *_values(sides, metric), _unit(sides, metric), judgement.interval, limit.ratio(metric),
        judgement.verdict, judgement.reason, judgement.doubts, tuple(rounds),
    )  # fmt: skip


def _values(sides: Sides, metric: MetricColumn) -> tuple[float | None, float | None]:
    baseline, candidate = (None if side is None else side.value(metric) for side in sides)
    return baseline, candidate


def _unit(sides: Sides, metric: MetricColumn) -> str:
    """The unit of both values; per kind of device if both sides have the same kind."""
    kinds = {side.device for side in sides if side is not None}
    return metric.unit if metric.device or len(kinds) != 1 else metric.unit_over(kinds.pop())


def _by_cell(measured: Baseline, window: Window) -> dict[str, CellSample]:
    return {sample.cell: sample for sample in measured.samples(window)}

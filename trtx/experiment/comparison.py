"""Any two runs or baselines side by side: in what they differ, and by how much each metric of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtx.bench.gate import DEFAULT_METRICS, Design, Limit, compare, measured_ratio
from trtx.bench.intervals import CONFIDENCE, Interval, per_interval
from trtx.bench.judgement import Refusal, Verdict
from trtx.bench.sample import Metric, Sample, Window
from trtx.experiment.baseline import Baseline
from trtx.experiment.conditions import Difference, differences, load_differences, refuse_others, unchecked

Sides = tuple[dict[str, Sample], dict[str, Sample]]  # by cell, of the baseline and of the candidate


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one cell on both sides."""

    cell: str
    metric: str
    baseline: float | None  # over all trials, in the metric's unit
    candidate: float | None
    unit: str
    ratio: Interval | None  # candidate / baseline
    reason: str | None  # why there is no ratio, or of its verdict
    verdict: Verdict | None  # None: nothing was judged


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a run, or a baseline, with the one that was named first."""

    baseline: Baseline
    candidate: Baseline
    differences: tuple[Difference, ...]
    unchecked: tuple[str, ...]  # conditions that neither knows
    metrics: tuple[ComparedMetric, ...]
    window: Window = "whole"  # of each trial, on both sides

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline.name,
            "candidate": self.candidate.name,
            "window": self.window,
            "differences": [{"name": one.name, "before": one.before, "now": one.now} for one in self.differences],
            "unchecked": list(self.unchecked),
            "metrics": [
                {
                    "cell": one.cell,
                    "metric": one.metric,
                    "baseline": one.baseline,
                    "candidate": one.candidate,
                    "unit": one.unit,
                    "ratio": None if one.ratio is None else one.ratio.estimate,
                    "low": None if one.ratio is None else one.ratio.low,
                    "high": None if one.ratio is None else one.ratio.high,
                    "verdict": None if one.verdict is None else one.verdict.value,
                    "reason": one.reason,
                }
                for one in self.metrics
            ],
        }


def compare_measured(
    baseline: Baseline,
    candidate: Baseline,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    *,
    max_error_rate: float = 0.0,
    limit: Limit | None = None,
    allowed: Sequence[str] = (),
    design: Design = "independent",
    window: Window = "whole",
) -> Comparison:
    """Every cell that either has. All intervals hold at once with 95 % (Bonferroni).

    With a ``limit`` the cells of ``candidate`` are judged as by a gate, and UsageError is raised where the two are of
    another model, load or machine and that is not ``allowed``. Without one nothing is refused: it is told.
    """
    sides = _by_cell(baseline, window), _by_cell(candidate, window)
    found = (
        *differences(baseline.conditions, candidate.conditions),
        *load_differences(baseline.cells, candidate.loads),
    )
    if limit is not None:
        refuse_others(baseline.name, found, allowed)
        rows = _judged(sides, metrics, max_error_rate, limit)
    else:
        rows = _measured(sides, candidate.name, metrics, max_error_rate, design)
    not_known = unchecked(baseline.conditions, candidate.conditions)
    return Comparison(baseline, candidate, found, not_known, rows, window)


def _judged(sides: Sides, metrics: Sequence[Metric], max_error_rate: float, limit: Limit) -> tuple[ComparedMetric, ...]:
    of_baseline, of_candidate = (tuple(side.values()) for side in sides)
    judgements = compare(of_baseline, of_candidate, limit, metrics, max_error_rate=max_error_rate)
    by_name = {metric.name: metric for metric in metrics}
    return tuple(
        _row(one.cell, by_name[one.criterion], sides, one.interval, one.reason, one.verdict) for one in judgements
    )


def _measured(
    sides: Sides, candidate: str, metrics: Sequence[Metric], max_error_rate: float, design: Design
) -> tuple[ComparedMetric, ...]:
    cells = tuple(dict.fromkeys((*sides[0], *sides[1])))
    confidence = per_interval(CONFIDENCE, max(1, len(cells) * len(metrics)))
    rows = []
    for cell in cells:
        for metric in metrics:
            measured = sides[1].get(cell)
            ratio = (
                Refusal(Verdict.NO_VERDICT, f"{candidate} has no such cell")
                if measured is None
                else measured_ratio(
                    sides[0].get(cell),
                    measured,
                    metric,
                    design=design,
                    max_error_rate=max_error_rate,
                    confidence=confidence,
                )
            )
            interval, reason = (None, ratio.reason) if isinstance(ratio, Refusal) else (ratio, None)
            rows.append(_row(cell, metric, sides, interval, reason, None))
    return tuple(rows)


def _row(
    cell: str,
    metric: Metric,
    sides: Sides,
    ratio: Interval | None,
    reason: str | None,
    verdict: Verdict | None,
) -> ComparedMetric:
    baseline, candidate = (side[cell].value(metric) if cell in side else None for side in sides)
    return ComparedMetric(cell, metric.name, baseline, candidate, metric.figure.unit, ratio, reason, verdict)


def _by_cell(measured: Baseline, window: Window) -> dict[str, Sample]:
    return {sample.cell: sample for sample in measured.samples(window)}

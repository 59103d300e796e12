"""Checks before a measurement whether a gate can reach a verdict: a limit below the baseline's own spread never
passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtx.bench.judge.judgement import UnjudgedValue
from trtx.bench.judge.regression import DEFAULT_METRICS, GateLimit, comparable_values
from trtx.bench.judge.sample import CellSample, MetricColumn
from trtx.errors import UsageError
from trtx.stats.intervals import CONFIDENCE, expected_margin, per_interval, relative_spread, trials_needed


def check_resolvable(
    baseline: Sequence[CellSample],
    cells: Sequence[str],
    trials: int,
    limit: GateLimit,
    metrics: Sequence[MetricColumn] = DEFAULT_METRICS,
    *,
    max_error_rate: float = 0.0,
    confidence: float = CONFIDENCE,
) -> None:
    """Checks whether ``trials`` trials of ``cells`` can pass this limit at all.

    Raises UsageError if the baseline lacks a cell or a metric, or if even an identical candidate would get no verdict:
    with the baseline's spread on both sides, the interval around a ratio of 1 extends beyond the limit. The message
    says how many trials and requests are needed (see :func:`trtx.stats.intervals.trials_needed`).
    """
    of_baseline = {sample.cell: sample for sample in baseline}
    if lacking := [cell for cell in cells if cell not in of_baseline]:
        raise UsageError(
            f"the baseline has no cell {', '.join(lacking)}; expected all cells of this run, but it has only "
            f"{', '.join(of_baseline) or 'none'}"
        )
    each = per_interval(confidence, max(1, len(cells) * len(metrics)))
    for cell in cells:
        for metric in metrics:
            values = comparable_values(of_baseline[cell], metric, max_error_rate)
            if isinstance(values, UnjudgedValue):
                raise UsageError(f"{metric.name} can't be compared with the baseline's {cell}: {values.reason}")
            _check(of_baseline[cell], metric, values, trials, limit, each)


def _check(
    sample: CellSample, metric: MetricColumn, values: Sequence[float], trials: int, limit: GateLimit, confidence: float
) -> None:
    option = f"--max-regression {limit.percent:g}%"
    spread = relative_spread(values)
    if spread is None or trials < 2:
        side = "the baseline has" if spread is None else "the candidate would have"
        raise UsageError(
            f"{option}: {side} one trial of {sample.cell}, which gives no interval; expected at least 2, preferably 5"
        )
    margin = expected_margin(spread, (trials, len(values)), confidence)
    if margin <= limit.margin(metric):
        return
    needed = trials_needed(spread, limit.margin(metric), confidence)
    requests = sum(sample.requests()) / len(values)
    advice = (
        f"take {needed} trials of {requests:.0f} requests ({needed * requests:,.0f} in all) on each side"
        if needed
        else "no affordable number of trials would be enough"
    )
    raise UsageError(
        f"{option} can't be resolved: {metric.name} of {sample.cell} varies by {100 * spread:.2g} % between the "
        f"baseline's trials, so a factor below {margin:.3g} could be chance with {len(values)} of them and {trials} "
        f"new ones; {advice}, or raise the limit"
    )

"""The gate against a baseline: is a candidate worse by more than a limit, beyond what chance explains?

For each cell and metric, the gate computes the ratio candidate / baseline and its confidence interval over trials. If
the whole interval is worse than the limit, the verdict is REGRESSED; if none of it is, PASS. If the limit lies within
the interval, the verdict is NO_VERDICT, which doesn't count as a pass. The confidence level applies to all intervals
of one gate together (Bonferroni), so that more cells don't raise the chance of a false alarm. docs/verdicts.md has the
rules and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trtx.bench.judge.judgement import CheckResult, UnjudgedValue, Verdict, doubts, why_not_judged
from trtx.bench.judge.sample import DEVICES, CellSample, MetricColumn, parse_metric, parse_percent
from trtx.bench.metric_types import PerDevice
from trtx.bench.metrics import (
    inter_token_latency,
    output_token_throughput,
    request_error_rate,
    time_to_first_token,
)
from trtx.errors import UsageError
from trtx.stats.intervals import CONFIDENCE, Interval, paired_ratio_interval, per_interval, ratio_interval

# Throughput of the server, time to the first token, and the pace of the following tokens. E2E latency follows from the
# last two; tail percentiles need more requests than a short job has, and are available with --metrics.
DEFAULT_METRICS = (
    MetricColumn(output_token_throughput, None),
    MetricColumn(time_to_first_token, 50),
    MetricColumn(inter_token_latency, 50),
)
Design = Literal["independent", "paired"]  # trials of two runs, or blocks of an A/B run
_BASELINE = "baseline: "


@dataclass(frozen=True, slots=True)
class GateLimit:
    """The maximum by which a metric may be worse, in % of the baseline: higher for a latency, lower for a
    throughput.
    """

    percent: float

    def ratio(self, metric: MetricColumn) -> float:
        """The ratio candidate / baseline at which the metric is worse by exactly the limit."""
        return 1 + self._sign(metric) * self.percent / 100

    def margin(self, metric: MetricColumn) -> float:
        """The distance of that ratio from 1, as a factor above 1."""
        return math.exp(abs(math.log(self.ratio(metric))))

    def verdict(self, metric: MetricColumn, ratio: Interval) -> Verdict:
        sign, limit = self._sign(metric), self.ratio(metric)
        best, worst = (ratio.low, ratio.high) if sign > 0 else (ratio.high, ratio.low)
        if sign * best > sign * limit:
            return Verdict.REGRESSED
        return Verdict.NO_VERDICT if sign * worst > sign * limit else Verdict.PASS

    def _sign(self, metric: MetricColumn) -> int:
        return 1 if metric.metric.better == "lower" else -1


def parse_limit(text: str) -> GateLimit:
    """Parses the value of ``--max-regression``, such as ``5%``. Raises UsageError."""
    percent = parse_percent("--max-regression", text)
    if not 0 < percent < 100:
        raise UsageError(f"--max-regression {text}: expected above 0% and below 100%; no measurement can resolve 0%")
    return GateLimit(percent)


def parse_metrics(texts: Sequence[str]) -> tuple[MetricColumn, ...]:
    """Parses the values of ``--metrics``, such as ``time_to_first_token:p99``; each may occur once. Raises
    UsageError.
    """
    metrics = [_compared(text) for text in texts]
    twice = [metric.name for place, metric in enumerate(metrics) if metric in metrics[:place]]
    if twice:
        raise UsageError(f"--metrics: {twice[0]} is listed twice; list each metric once")
    return tuple(metrics)


def _compared(text: str) -> MetricColumn:
    metric = parse_metric(text, f"--metrics {text}")
    if metric.metric.better is None:
        raise UsageError(
            f"--metrics {text}: neither a high nor a low value is better, so it can't regress; choose another metric"
        )
    if metric.metric.better == "lower" and metric.metric.unit in ("%", "requests"):
        raise UsageError(f"--metrics {text}: its best value is 0, which has no ratio; use --max-error-rate")
    return metric


def compare(
    baseline: Sequence[CellSample],
    candidate: Sequence[CellSample],
    limit: GateLimit,
    metrics: Sequence[MetricColumn] = DEFAULT_METRICS,
    *,
    design: Design = "independent",
    max_error_rate: float = 0.0,
    confidence: float = CONFIDENCE,
) -> tuple[CheckResult, ...]:
    """One judgement for each cell and metric of the candidate, in their order.

    ``candidate`` must contain every planned cell, also those without a result, which fail. Cells that only the baseline
    has are ignored. ``max_error_rate`` is in %. ``confidence`` applies to all intervals together.
    """
    of_baseline = {sample.cell: sample for sample in baseline}
    each = per_interval(confidence, max(1, len(candidate) * len(metrics)))
    judgements = []
    for sample in candidate:
        for metric in metrics:
            paired_with = of_baseline.get(sample.cell)
            marks = doubts_of_both(paired_with, sample)
            ratio = measured_ratio(
                paired_with, sample, metric, design=design, max_error_rate=max_error_rate, confidence=each
            )
            if isinstance(ratio, UnjudgedValue):
                judgements.append(ratio.of(sample, metric.name, marks))
            else:
                judgements.append(_judgement(sample, metric, ratio, limit, marks))
    return tuple(judgements)


def doubts_of_both(baseline: CellSample | None, candidate: CellSample | None) -> tuple[str, ...]:
    """The reasons why a cell is SUSPECT, on either side."""
    sides = ((candidate, ""), (baseline, _BASELINE))
    return tuple(doubt for sample, side in sides if sample is not None for doubt in doubts(sample, side))


def comparable_values(
    sample: CellSample, metric: MetricColumn, max_error_rate: float = 0.0
) -> tuple[float, ...] | UnjudgedValue:
    """A metric's value in each trial of a cell, or the reason why it can't be compared."""
    if refusal := why_not_judged(sample):
        return refusal
    error_rate = sample.whole.value(MetricColumn(request_error_rate, None))
    if error_rate is None or error_rate > max_error_rate:
        # The metrics cover only the requests that succeeded: the easy ones, under less load.
        found = "–" if error_rate is None else f"{error_rate:.3g}"
        return UnjudgedValue(Verdict.FAILED, f"{found} % of the requests failed; expected at most {max_error_rate:g} %")
    if why := sample.lacks_device(metric):
        return UnjudgedValue(Verdict.FAILED, why)
    if why := sample.lacks_readings(metric):
        return UnjudgedValue(Verdict.NO_VERDICT, why)
    values = sample.values(metric)
    known = tuple(value for value in values if value is not None)
    if len(known) < len(values):
        return UnjudgedValue(
            Verdict.FAILED, f"{len(values) - len(known)} of {len(values)} trials lack it; expected it in all"
        )
    if sample.fewest_samples(metric) < metric.samples_needed:
        return UnjudgedValue(
            Verdict.NO_VERDICT,
            f"it needs {metric.samples_needed} requests in each trial, but one has {sample.fewest_samples(metric)}; "
            "measure more requests per trial, or compare a smaller percentile",
        )
    if min(known, default=1) <= 0:
        return UnjudgedValue(Verdict.NO_VERDICT, "it is 0 in a trial, so there is no ratio")
    return known


def measured_ratio(
    baseline: CellSample | None,
    candidate: CellSample,
    metric: MetricColumn,
    *,
    design: Design = "independent",
    max_error_rate: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Interval | UnjudgedValue:
    """The ratio candidate / baseline in one cell, or why there is none. ``confidence`` applies to this interval
    alone.
    """
    of_candidate = comparable_values(candidate, metric, max_error_rate)
    if isinstance(of_candidate, UnjudgedValue):
        return of_candidate
    if baseline is None:
        return UnjudgedValue(Verdict.NO_VERDICT, "the baseline has no such cell; measure it there too")
    of_baseline = comparable_values(baseline, metric, max_error_rate)
    if isinstance(of_baseline, UnjudgedValue):  # not the candidate's fault
        return UnjudgedValue(Verdict.NO_VERDICT, f"{_BASELINE}{of_baseline.reason}")
    if isinstance(metric.metric, PerDevice) and baseline.device != candidate.device:
        over = " and the other per ".join(
            "device" if kind is None else DEVICES[kind] for kind in (baseline.device, candidate.device)
        )
        return UnjudgedValue(Verdict.NO_VERDICT, f"one side is per {over}, so they can't be compared")
    if design == "paired" and len(of_candidate) != len(of_baseline):
        found = f"{len(of_baseline)} rounds of the baseline and {len(of_candidate)} of the candidate"
        return UnjudgedValue(Verdict.NO_VERDICT, f"{found} don't form pairs; expected equal numbers")
    interval = (paired_ratio_interval if design == "paired" else ratio_interval)(of_candidate, of_baseline, confidence)
    return interval or UnjudgedValue(
        Verdict.NO_VERDICT,
        f"{len(of_baseline)} and {len(of_candidate)} trials give no interval; expected at least 2 on each side, "
        "preferably 5",
    )


def _judgement(
    sample: CellSample, metric: MetricColumn, ratio: Interval, limit: GateLimit, marks: tuple[str, ...]
) -> CheckResult:
    verdict, bound = limit.verdict(metric, ratio), f"the limit {limit.ratio(metric):.4g}"
    meaning = {
        Verdict.PASS: f"within {bound}",
        Verdict.REGRESSED: f"all beyond {bound}",
        Verdict.NO_VERDICT: f"which contains {bound}; measure more or longer trials",
    }[verdict]
    return CheckResult(
        cell=sample.cell,
        criterion=metric.name,
        verdict=verdict,
        reason=f"{ratio.estimate:.4f} of the baseline{sample.where}, {ratio.low:.4f} to {ratio.high:.4f}, {meaning}",
        doubts=marks,
        value=ratio.estimate,
        interval=ratio,
        limit=limit.ratio(metric),
    )

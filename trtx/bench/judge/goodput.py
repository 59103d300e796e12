"""Goodput: the rate of requests that each met the objectives for all latencies, in requests/s.

The definition is that of aiperf and of DistServe (Zhong et al., OSDI 2024): good requests / duration of the trial. A
request without one of the latencies is not good (an answer of one token, for example, has no ITL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trtx.bench.judge.judgement import CheckResult, doubts, why_not_judged
from trtx.bench.judge.sample import CellSample
from trtx.bench.judge.slo import Bound, Objective, judge_bound
from trtx.bench.metric_types import Records, Spread
from trtx.bench.metrics import benchmark_duration
from trtx.bench.phases import Span, requests_in
from trtx.bench.records import RequestRecord
from trtx.errors import UsageError

Bounds = Mapping[Spread, Bound]


def request_bounds(objectives: Sequence[Objective]) -> Bounds:
    """The bound that a request must meet for each latency to be good.

    Raises UsageError if no objective is about a latency. If a latency has several objectives, the widest bound applies:
    an objective for its p50 allows half of the requests to be slower.
    """
    bounds: dict[Spread, Bound] = {}
    for objective in objectives:
        metric, bound = objective.metric.metric, objective.bound
        if isinstance(metric, Spread) and (metric not in bounds or bound.threshold > bounds[metric].threshold):
            bounds[metric] = bound
    if not bounds:
        raise UsageError(
            "--min-goodput has no effect without the --slo of a latency, which a request has to meet to be good; "
            "expected one, as --slo time_to_first_token:p99:le:500"
        )
    return bounds


def goodput(records: Records, bounds: Bounds, span: Span | None = None) -> float | None:
    """Goodput of one trial in requests/s.

    None if the trial has no duration, or if a request's latency is unknown because its tokens were not counted: the
    request may have been good. With ``span``, only this part of the trial counts, and each good request is weighted by
    the share of its time that lies within the span.
    """
    if any(_is_unknown(record, bounds) for record in records):
        return None
    if span is not None:
        return sum(requests_in(record, span) for record in records if _is_good(record, bounds)) / span.duration_s
    duration = benchmark_duration(records)
    return sum(_is_good(record, bounds) for record in records) / duration if duration else None


def judge_goodput(sample: CellSample, goodputs: Sequence[float | None], minimum: float) -> CheckResult:
    """Judges one cell: compares the mean of its trials' :func:`goodput` with the required minimum."""
    bound = Bound("ge", minimum, "requests/s")
    criterion = f"goodput:avg:ge:{minimum:.10g}"
    if refusal := why_not_judged(sample):
        return refusal.of(sample, criterion, doubts(sample))
    known = [value for value in goodputs if value is not None]
    is_whole = len(known) == len(sample.trials) > 0
    return judge_bound(sample, criterion, bound, math.fsum(known) / len(known) if is_whole else None, goodputs)


def _is_unknown(record: RequestRecord, bounds: Bounds) -> bool:
    """Whether the tokens were not counted and every latency that is known meets its bound."""
    if not record.succeeded or record.is_counted:
        return False
    samples = _samples(record, bounds)
    return not all(values for values, _ in samples) and all(
        bound.holds(one) for found, bound in samples for one in found
    )


def _is_good(record: RequestRecord, bounds: Bounds) -> bool:
    return all(values and bound.holds(values[0]) for values, bound in _samples(record, bounds))


def _samples(record: RequestRecord, bounds: Bounds) -> list[tuple[list[float], Bound]]:
    """Latencies from the metrics' own formulas, which return none for a failed request."""
    return [(metric.formula([record]), bound) for metric, bound in bounds.items()]

"""Goodput: requests per second that each met the objectives of all latencies.

aiperf's definition, and that of DistServe (Zhong et al., OSDI 2024): good requests / duration of the trial. A request
that lacks one of the latencies, as an answer of one token has no ITL, is not good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trtx.bench.figures import Records, Spread
from trtx.bench.judge.judgement import Judgement, doubts, why_not_judged
from trtx.bench.judge.sample import Sample
from trtx.bench.judge.slo import Bound, Objective, judge_bound
from trtx.bench.metrics import benchmark_duration
from trtx.bench.records import RequestRecord
from trtx.bench.windows import Span, requests_in
from trtx.errors import UsageError

Bounds = Mapping[Spread, Bound]


def request_bounds(objectives: Sequence[Objective]) -> Bounds:
    """What each request has to keep to be good. Or UsageError, where no objective is about a latency.

    Where a latency has several objectives it is the widest: one of its p50 lets half of the requests be slower.
    """
    bounds: dict[Spread, Bound] = {}
    for objective in objectives:
        figure, bound = objective.metric.figure, objective.bound
        if isinstance(figure, Spread) and (figure not in bounds or bound.threshold > bounds[figure].threshold):
            bounds[figure] = bound
    if not bounds:
        raise UsageError(
            "--min-goodput means nothing without the --slo of a latency, which a request has to meet to be good; "
            "expected one, as --slo time_to_first_token:p99:le:500"
        )
    return bounds


def goodput(records: Records, bounds: Bounds, span: Span | None = None) -> float | None:
    """Of one trial, in requests/s; None where no time passed, as no request was measured, and where a latency of a
    request can't be computed because nobody counted its tokens: it may have been good.

    ``span``: of this part of it, in which each good request counts by the share of its time that lies in it.
    """
    if any(_is_unknown(record, bounds) for record in records):
        return None
    if span is not None:
        return sum(requests_in(record, span) for record in records if _is_good(record, bounds)) / span.duration_s
    duration = benchmark_duration(records)
    return sum(_is_good(record, bounds) for record in records) / duration if duration else None


def judge_goodput(sample: Sample, goodputs: Sequence[float | None], minimum: float) -> Judgement:
    """Of one cell: the mean over trials of their :func:`goodput` against the least that there has to be."""
    bound = Bound("ge", minimum, "requests/s")
    criterion = f"goodput:avg:ge:{minimum:.10g}"
    if refusal := why_not_judged(sample):
        return refusal.of(sample, criterion, doubts(sample))
    known = [value for value in goodputs if value is not None]
    is_whole = len(known) == len(sample.trials) > 0
    return judge_bound(sample, criterion, bound, math.fsum(known) / len(known) if is_whole else None, goodputs)


def _is_unknown(record: RequestRecord, bounds: Bounds) -> bool:
    """Nobody counted its tokens, and all that is known of it keeps its bounds."""
    if not record.succeeded or record.is_counted:
        return False
    samples = _samples(record, bounds)
    return not all(values for values, _ in samples) and all(
        bound.holds(one) for found, bound in samples for one in found
    )


def _is_good(record: RequestRecord, bounds: Bounds) -> bool:
    return all(values and bound.holds(values[0]) for values, bound in _samples(record, bounds))


def _samples(record: RequestRecord, bounds: Bounds) -> list[tuple[list[float], Bound]]:
    """By the figure's own formula, which gives none of a request that failed."""
    return [(figure.formula([record]), bound) for figure, bound in bounds.items()]

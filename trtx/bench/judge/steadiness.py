"""Tests whether latencies are steady, by comparing warm-up and measured part, and the two halves of the measured part.

Each test compares the confidence interval of the ratio of two latency levels with the tolerance. The latencies are
steady if the whole interval is inside the tolerance, not steady if it is outside, and otherwise the answer is unknown:
there were too few requests, or they were too noisy. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import fmean, variance

from trtx.bench.phases import NoSteadyPart, Phases, sent_in
from trtx.bench.records import RequestRecord

Records = Sequence[RequestRecord]

BATCHES = 8  # batches per side, and therefore the minimum number of requests per side
# Half-width of a two-sided 99 % interval, in standard errors. Simulated with 400,000 draws: the factor is 3.86 if one
# side's error comes from the successive differences of BATCHES normal means and the other side has no error, and 3.14
# for two sides of equal size. So intervals tend to be too wide. With 95 % intervals, one healthy cell in twenty would
# be called disturbed.
_ERRORS = 3.87


class Steadiness(Enum):
    STEADY = "steady"
    NOT_STEADY = "not steady"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LatencyLevel:
    """A latency to compare, and the tolerance within which two levels count as equal."""

    title: str
    tolerance: float  # of the ratio: 0.1 accepts 1 / 1.1 to 1.1
    of: Callable[[RequestRecord], float | None]


# TTFT consists mostly of queueing, which varies more from minute to minute than step times do.
_STREAMED = (
    LatencyLevel("TTFT", 0.25, lambda record: record.time_to_first_token),
    LatencyLevel("ITL", 0.10, lambda record: record.inter_token_latency),
)
_WHOLE = (LatencyLevel("E2E", 0.10, lambda record: record.request_latency),)


@dataclass(frozen=True, slots=True)
class SteadinessResult:
    """The result, and a clause with the numbers that it follows from."""

    steadiness: Steadiness
    reason: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of the geometric means of two sets of latencies, with its 99 % interval."""

    value: float
    low: float
    high: float


def level_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """The ratio ``after`` / ``before`` of two sets of latencies in send order; None if there are too few.

    It is computed from the difference of the means of the logarithms. Requests that were served together aren't
    independent, so the variance of a side's mean is the larger of two estimates: from its n samples, and from BATCHES
    batch means.
    """
    sides = [[math.log(value) for value in side if value > 0] for side in (before, after)]
    if min(map(len, sides)) < BATCHES:
        return None
    difference = fmean(sides[1]) - fmean(sides[0])
    half_width = _ERRORS * math.sqrt(sum(map(_variance_of_mean, sides)))
    return Ratio(math.exp(difference), math.exp(difference - half_width), math.exp(difference + half_width))


def warm_up_needed(concurrency: int) -> int:
    """Minimum number of warm-up requests of a closed loop with which :func:`judge_warm_up` can decide.

    A round is one request per slot. The warm-up needs one round to fill the slots, one to drain the initial queue, and
    then two halves, of which the later is judged. Each half needs one round, and at least BATCHES requests.
    """
    return 2 * concurrency + 2 * max(BATCHES, concurrency) + 1


def judge_warm_up(warm_up: Phases | NoSteadyPart, requests: Records, steady: Records) -> SteadinessResult:
    """Whether the latencies had reached their measured level by the end of the warm-up.

    ``requests``: the warm-up's. ``steady``: those sent in the measured steady part. Only the later half of the
    warm-up's own steady part is compared, at least BATCHES requests, because its beginning may be cold.
    """
    if isinstance(warm_up, NoSteadyPart):
        return SteadinessResult(Steadiness.UNKNOWN, f"of {len(requests)} warm-up requests, {warm_up.reason}")
    held = _in_order(sent_in(requests, warm_up.steady))
    later = held[-max(BATCHES, len(held) // 2) :]
    return _judge(later, _in_order(steady), "in the measured part", "late in the warm-up")


def judge_trend(steady: Records) -> SteadinessResult:
    """Whether latencies stayed at their level from the first to the second half of the requests in the steady part."""
    ordered = _in_order(steady)
    middle = len(ordered) // 2
    return _judge(ordered[:middle], ordered[middle:], "in the second half", "in the first")


def _judge(before: Records, after: Records, when_after: str, when_before: str) -> SteadinessResult:
    streamed = any(record.time_to_first_token is not None for record in (*before, *after))
    apart, open_, steady_ = [], [], []
    for level in _STREAMED if streamed else _WHOLE:
        sides = [[value for record in side if (value := level.of(record)) is not None] for side in (before, after)]
        if level.title == "ITL" and not any(sides):
            continue  # every answer has one token or arrived in one piece
        ratio = level_ratio(*sides)
        if ratio is None:
            few = min(map(len, sides))
            open_.append(f"{few} requests have {_an(level.title)}, but {BATCHES} are needed on each side")
            continue
        sentence = (
            f"{level.title} was {ratio.value:.3g} times as long {when_after} as {when_before} "
            f"(99 %: {ratio.low:.3g} to {ratio.high:.3g})"
        )
        same = (1 / (1 + level.tolerance), 1 + level.tolerance)
        if ratio.high < same[0] or ratio.low > same[1]:
            apart.append(sentence)
        elif same[0] <= ratio.low and ratio.high <= same[1]:
            steady_.append(sentence)
        else:
            open_.append(sentence)
    if apart:
        return SteadinessResult(Steadiness.NOT_STEADY, "; ".join(apart))
    if open_:
        return SteadinessResult(Steadiness.UNKNOWN, "; ".join(open_))
    return SteadinessResult(Steadiness.STEADY, "; ".join(steady_))


def _in_order(records: Records) -> list[RequestRecord]:
    """The successful requests in send order."""
    return sorted((record for record in records if record.succeeded), key=lambda record: record.start_ns)


def _variance_of_mean(values: Sequence[float]) -> float:
    """The variance of a mean: the larger of the estimates from single values and from batch means.

    The batch estimate uses the differences between successive batches. The test looks for a trend, and a trend would
    inflate an ordinary variance, widen the interval, and so hide itself. It hardly affects successive differences (von
    Neumann et al. 1941).
    """
    size = len(values)
    batches = [fmean(values[i * size // BATCHES : (i + 1) * size // BATCHES]) for i in range(BATCHES)]
    of_batches = sum((after - before) ** 2 for before, after in pairwise(batches)) / (2 * (BATCHES - 1))
    return max(of_batches / BATCHES, variance(values) / size)


def _an(title: str) -> str:
    return f"an {title}" if title[0] in "EI" else f"a {title}"

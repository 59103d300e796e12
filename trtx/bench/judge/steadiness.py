"""Whether latencies kept their level: of warm-up against the measured part, of its first half against its second.

Three answers, because few or noisy requests tell nothing: the interval of the ratio of two levels lies within what
counts as the same, or beyond it, or neither. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import fmean, variance

from trtx.bench.records import RequestRecord
from trtx.bench.windows import NoSteadyPart, Phases, sent_in

Records = Sequence[RequestRecord]

BATCHES = 8  # of each side, and so the fewest requests of one
# Half-widths of a two-sided interval of 99 % in standard errors, where one side's error comes from the successive
# differences of BATCHES normal means and the other's is 0: 3.86 in 400,000 simulated draws. Two sides of one size take
# 3.14, so intervals are rather too wide. At 95 % one healthy cell in twenty would be called disturbed.
_ERRORS = 3.87


class Steadiness(Enum):
    STEADY = "steady"
    NOT_STEADY = "not steady"
    UNKNOWN = "can't be told"


@dataclass(frozen=True, slots=True)
class Level:
    """A latency whose level is compared, and how far apart two levels may be that count as the same."""

    title: str
    tolerance: float  # of the ratio: 0.1 takes 1 / 1.1 to 1.1
    of: Callable[[RequestRecord], float | None]


# The time to the first token is mostly queueing, which differs more from minute to minute than the steps do.
_STREAMED = (
    Level("TTFT", 0.25, lambda record: record.time_to_first_token),
    Level("ITL", 0.10, lambda record: record.inter_token_latency),
)
_WHOLE = (Level("E2E", 0.10, lambda record: record.request_latency),)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer, and a clause with the figures that it rests on."""

    steadiness: Steadiness
    reason: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the geometric means of two sets of latencies, with its interval of 99 %."""

    value: float
    low: float
    high: float


def level_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """``after`` over ``before``, each in the order in which the requests were sent; None with too few to tell.

    From the difference of the means of the logarithms. Requests that were served together aren't independent, so a side
    of n counts as n samples or as BATCHES batch means, whichever says less.
    """
    sides = [[math.log(value) for value in side if value > 0] for side in (before, after)]
    if min(map(len, sides)) < BATCHES:
        return None
    difference = fmean(sides[1]) - fmean(sides[0])
    half_width = _ERRORS * math.sqrt(sum(map(_variance_of_mean, sides)))
    return Ratio(math.exp(difference), math.exp(difference - half_width), math.exp(difference + half_width))


def warm_up_needed(concurrency: int) -> int:
    """The fewest warm-up requests of a closed loop that :func:`judge_warm_up` can say anything of.

    A round that fills the slots, one that empties the start's queue, and two halves of BATCHES or of a round, of which
    the later one is judged.
    """
    return 2 * concurrency + 2 * max(BATCHES, concurrency) + 1


def judge_warm_up(warm_up: Phases | NoSteadyPart, requests: Records, steady: Records) -> Judgement:
    """Whether the latencies had their measured level when the warm-up ended.

    ``requests`` are those of the warm-up, ``steady`` those sent in the measured steady part. What is compared is the
    later half of the warm-up's own steady part, at least BATCHES requests: its beginning may be cold.
    """
    if isinstance(warm_up, NoSteadyPart):
        return Judgement(Steadiness.UNKNOWN, f"of {len(requests)} warm-up requests, {warm_up.reason}")
    held = _in_order(sent_in(requests, warm_up.steady))
    later = held[-max(BATCHES, len(held) // 2) :]
    return _judge(later, _in_order(steady), "in the measured part", "late in the warm-up")


def judge_trend(steady: Records) -> Judgement:
    """Whether latencies kept their level from the first half to the second of what was sent in the steady part."""
    ordered = _in_order(steady)
    middle = len(ordered) // 2
    return _judge(ordered[:middle], ordered[middle:], "in the second half", "in the first")


def _judge(before: Records, after: Records, when_after: str, when_before: str) -> Judgement:
    streamed = any(record.time_to_first_token is not None for record in (*before, *after))
    apart, open_, told = [], [], []
    for level in _STREAMED if streamed else _WHOLE:
        sides = [[value for record in side if (value := level.of(record)) is not None] for side in (before, after)]
        if level.title == "ITL" and not any(sides):
            continue  # answers of one token or in one piece
        ratio = level_ratio(*sides)
        if ratio is None:
            few = min(map(len, sides))
            open_.append(f"{few} requests have {_an(level.title)} to compare by, {BATCHES} a side are needed")
            continue
        said = (
            f"{level.title} was {ratio.value:.3g} times as long {when_after} as {when_before} "
            f"(99 %: {ratio.low:.3g} to {ratio.high:.3g})"
        )
        same = (1 / (1 + level.tolerance), 1 + level.tolerance)
        if ratio.high < same[0] or ratio.low > same[1]:
            apart.append(said)
        elif same[0] <= ratio.low and ratio.high <= same[1]:
            told.append(said)
        else:
            open_.append(said)
    if apart:
        return Judgement(Steadiness.NOT_STEADY, "; ".join(apart))
    if open_:
        return Judgement(Steadiness.UNKNOWN, "; ".join(open_))
    return Judgement(Steadiness.STEADY, "; ".join(told))


def _in_order(records: Records) -> list[RequestRecord]:
    """Those that succeeded, as they were sent."""
    return sorted((record for record in records if record.succeeded), key=lambda record: record.start_ns)


def _variance_of_mean(values: Sequence[float]) -> float:
    """The larger of what single values say of it and what batches say, by their successive differences.

    A trend, which is what is looked for, enters a variance about the mean, and would hide itself; it hardly enters the
    differences of neighbours (von Neumann et al. 1941).
    """
    size = len(values)
    batches = [fmean(values[i * size // BATCHES : (i + 1) * size // BATCHES]) for i in range(BATCHES)]
    of_batches = sum((after - before) ** 2 for before, after in pairwise(batches)) / (2 * (BATCHES - 1))
    return max(of_batches / BATCHES, variance(values) / size)


def _an(title: str) -> str:
    return f"an {title}" if title[0] in "EI" else f"a {title}"

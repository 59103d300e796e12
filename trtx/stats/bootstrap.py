"""An interval of any statistic over the requests of one trial, which are not independent of one another.

In a closed loop a request starts when another ends, and requests that run at one time share a batch: neighbours are
alike, and an interval that takes them for independent is too narrow. So whole blocks of neighbours are drawn: the
stationary bootstrap of Politis and Romano (1994, JASA 89:1303), whose blocks have geometric lengths. Their mean length
follows from the autocorrelation: Politis and White (2004, Econometric Reviews 23:53) as corrected by Patton, Politis
and White (2009, 28:372).

It says how well one trial knows its own figure. What differs from trial to trial (a start, a clock, a placement) is not
in it, so it takes the place of no interval over trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trtx.stats.intervals import CONFIDENCE, Interval
from trtx.stats.percentiles import percentile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RESAMPLES = 1000  # enough for the ends of a 95 % interval: 25 resamples beyond each
FEWEST_SAMPLES = 30  # below, there is no autocorrelation to speak of, and a resample is hardly another sample


def bootstrap_interval(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Of ``statistic`` over ``samples``, one a request in the order in which they were sent.

    The percentile interval (Efron and Tibshirani 1993). None for fewer than 30 samples, and where blocks would be so
    long that a tenth of the samples is in each: the trial is too short for what its requests have in common. Equal
    seeds give equal intervals.
    """
    import numpy as np

    count = len(samples)
    if count < FEWEST_SAMPLES:
        return None
    values = np.asarray(samples, dtype=float)
    length = block_length(samples)
    if length > count / 10:
        return None
    random = np.random.default_rng(seed)
    found = [statistic(values[_stationary(random, count, length)].tolist()) for _ in range(resamples)]
    beyond = 50 * (1 - confidence)
    return Interval(statistic(samples), percentile(found, beyond), percentile(found, 100 - beyond), confidence)


def block_length(samples: Sequence[float]) -> float:
    """The mean length of blocks with which the stationary bootstrap's variance of a mean has the least error.

    At least 1, which takes the samples for independent; at most min(3√n, n/3), as the sources have it.
    """
    import numpy as np

    count = len(samples)
    centred = np.asarray(samples, dtype=float) - np.mean(samples)
    if not centred @ centred:
        return 1.0
    # How far back to look: the first lag after which as many in a row as matter are no larger than chance.
    in_a_row = 5
    furthest = min(math.ceil(math.sqrt(count)) + in_a_row, count - 1)
    covariances = np.array([centred[lag:] @ centred[: count - lag] / count for lag in range(furthest + 1)])
    by_chance = 2 * math.sqrt(math.log10(count) / count)
    is_small = np.abs(covariances[1:] / covariances[0]) < by_chance
    last = next((lag for lag in range(furthest) if is_small[lag : lag + in_a_row].all()), furthest)
    lags = np.arange(1, min(2 * max(last, 1), furthest) + 1)
    # The flat-top window: 1 up to half of the furthest lag, then down to 0.
    weighted = np.minimum(1, 2 * (1 - lags / lags[-1])) * covariances[lags]
    spectrum = covariances[0] + 2 * weighted.sum()
    slope = 2 * (lags * weighted).sum()
    if spectrum == 0:
        return 1.0
    best: float = (abs(float(slope / spectrum)) * math.sqrt(count)) ** (2 / 3)
    return max(1.0, min(best, 3 * math.sqrt(count), count / 3))


def _stationary(random: np.random.Generator, count: int, length: float) -> npt.NDArray[np.int64]:
    """Places of one resample: from each, on to the next one, or, with probability 1 / ``length``, anywhere."""
    import numpy as np

    starts = random.random(count) < 1 / length
    starts[0] = True
    anywhere = random.integers(0, count, count)
    steps = np.arange(count)
    begun = np.maximum.accumulate(np.where(starts, steps, 0))  # where in the resample its block began
    places: npt.NDArray[np.int64] = (anywhere[begun] + steps - begun) % count
    return places

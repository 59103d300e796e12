"""Confidence interval of any statistic over the requests of one trial, which are not independent of each other.

In a closed loop, a request starts when another ends, and concurrent requests share a batch. Successive requests are
therefore correlated, and an interval that assumes independence is too narrow. The stationary bootstrap of Politis and
Romano (1994, JASA 89:1303) resamples blocks of successive requests with geometric lengths. The mean block length
follows from the autocorrelation: Politis and White (2004, Econometric Reviews 23:53), corrected by Patton, Politis and
White (2009, 28:372).

The interval describes the uncertainty within one trial. It doesn't contain the variation between trials (starts,
clocks, placement), so it can't replace an interval over trials.
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

RESAMPLES = 1000  # enough for a 95 % interval: 25 resamples lie beyond each end
FEWEST_SAMPLES = 30  # fewer samples give no useful autocorrelation, and resamples hardly differ


def bootstrap_interval(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """The interval of ``statistic`` over ``samples``, one per request in send order.

    This is the percentile interval (Efron and Tibshirani 1993). Returns None with fewer than 30 samples, or if a block
    would contain more than a tenth of the samples: the trial is then too short for its correlation. Equal seeds give
    equal intervals.
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
    """The mean block length that minimises the error of the stationary bootstrap's variance of a mean.

    At least 1, which treats samples as independent; at most min(3√n, n/3), as in the sources.
    """
    import numpy as np

    count = len(samples)
    centred = np.asarray(samples, dtype=float) - np.mean(samples)
    if not centred @ centred:
        return 1.0
    # The furthest lag to use: the first one after which in_a_row lags have no more than chance correlation.
    in_a_row = 5
    furthest = min(math.ceil(math.sqrt(count)) + in_a_row, count - 1)
    covariances = np.array([centred[lag:] @ centred[: count - lag] / count for lag in range(furthest + 1)])
    by_chance = 2 * math.sqrt(math.log10(count) / count)
    is_small = np.abs(covariances[1:] / covariances[0]) < by_chance
    last = next((lag for lag in range(furthest) if is_small[lag : lag + in_a_row].all()), furthest)
    lags = np.arange(1, min(2 * max(last, 1), furthest) + 1)
    # The flat-top window: 1 up to half of the furthest lag, then falling linearly to 0.
    weighted = np.minimum(1, 2 * (1 - lags / lags[-1])) * covariances[lags]
    spectrum = covariances[0] + 2 * weighted.sum()
    slope = 2 * (lags * weighted).sum()
    if spectrum == 0:
        return 1.0
    best: float = (abs(float(slope / spectrum)) * math.sqrt(count)) ** (2 / 3)
    return max(1.0, min(best, 3 * math.sqrt(count), count / 3))


def _stationary(random: np.random.Generator, count: int, length: float) -> npt.NDArray[np.int64]:
    """The indices of one resample: each is followed by its successor or, with probability 1 / ``length``, by a random
    index.
    """
    import numpy as np

    starts = random.random(count) < 1 / length
    starts[0] = True
    anywhere = random.integers(0, count, count)
    steps = np.arange(count)
    begun = np.maximum.accumulate(np.where(starts, steps, 0))  # position in the resample at which the block began
    places: npt.NDArray[np.int64] = (anywhere[begun] + steps - begun) % count
    return places

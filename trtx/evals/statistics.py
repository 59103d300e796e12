"""Intervals of scores: over samples of a task, and over pairs of two runs that were asked the same.

Wilson (1927, JASA 22:209) for a share; Newcombe (1998, Statistics in Medicine 17:2635), method 10, for the difference
of two shares of the same samples; the percentile bootstrap (Efron and Tibshirani 1993) for all else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

from trtx.bench.intervals import CONFIDENCE, Interval
from trtx.checkpoint.held_out import interval as wilson
from trtx.evals.forms import Aggregation

RESAMPLES = 1000  # of a mean: 25 beyond each end of a 95 % interval
SLOW_RESAMPLES = 200  # of a metric that is computed over all samples at once, such as BLEU
FEWEST_SAMPLES = 10  # below, a resample of a bootstrap is hardly another sample
_FEWEST_BEYOND = 5  # resamples beyond an end that is read off them
_SEED = 20261122


def is_binary(values: Sequence[Any]) -> bool:
    return all(value in (0, 1) for value in values)


def share_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's, of the share of ones in zeros and ones; None for no values. Never of width zero: all of ten right is
    no proof of the eleventh."""
    if not values:
        return None
    low, high = wilson(sum(values), len(values), confidence)
    return Interval(sum(values) / len(values), low, high, confidence)


def bootstrap_interval(
    samples: Sequence[Any],
    statistic: Callable[[list[Any]], float],
    *,
    resamples: int,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Of ``statistic`` over independent samples; None for fewer than 10. Equal samples give equal intervals."""
    if len(samples) < FEWEST_SAMPLES:
        return None
    draw = random.Random(_SEED)
    kept = list(samples)
    found = sorted(statistic(draw.choices(kept, k=len(kept))) for _ in range(resamples))
    return Interval(statistic(kept), *_ends(found, confidence), confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Bootstrap of a mean, as :func:`bootstrap_interval`."""
    return strata_interval([values], [1.0], confidence)


def strata_interval(
    strata: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Of the weighted sum of the means of several tasks, each resampled by itself; None for fewer than 10 values."""
    import numpy as np

    if sum(map(len, strata)) < FEWEST_SAMPLES or not all(strata):
        return None
    draw = np.random.default_rng(_SEED)
    means = np.zeros(RESAMPLES)
    estimate = 0.0
    for values, weight in zip(strata, weights, strict=True):
        array = np.asarray(values, dtype=float)
        estimate += weight * float(array.mean())
        for place in range(RESAMPLES):
            means[place] += weight * array[draw.integers(0, len(array), len(array))].mean()
    return Interval(estimate, *_ends(sorted(means.tolist()), confidence), confidence)


def difference_interval(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Of candidate − baseline, of the same samples in the same order. None for none, or too few that are not 0 or 1."""
    pairs = list(zip(candidate, baseline, strict=True))
    if not pairs:
        return None
    if is_binary(candidate) and is_binary(baseline):
        return _newcombe(pairs, confidence)
    return mean_interval([of_candidate - of_baseline for of_candidate, of_baseline in pairs], confidence)


def ratio_difference_interval(
    candidate: Sequence[tuple[float, float]],
    baseline: Sequence[tuple[float, float]],
    aggregation: Aggregation,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Of candidate − baseline of a score that is made of sums over samples; None for fewer than 10.

    ``candidate``, ``baseline``: of the same samples in the same order, each a log-likelihood and what it is divided by,
    such as words. Samples are drawn in pairs, so what makes one text harder than another is in both, and falls out.
    """
    import numpy as np

    if len(candidate) < FEWEST_SAMPLES:
        return None
    score = _RATIOS[aggregation]
    draw = np.random.default_rng(_SEED)
    both = [np.asarray(pairs, dtype=float) for pairs in (candidate, baseline)]

    def difference(rows: Any) -> float:
        of_candidate, of_baseline = (score(pairs[rows].sum(axis=0)) for pairs in both)
        return float(of_candidate - of_baseline)

    count = len(candidate)
    found = sorted(difference(draw.integers(0, count, count)) for _ in range(RESAMPLES))
    return Interval(difference(np.arange(count)), *_ends(found, confidence), confidence)


# lm-eval's own, of the sums of log-likelihoods and of what they are divided by (lm_eval/api/metrics.py, 0.4.13).
_RATIOS: dict[Aggregation, Callable[[Any], float]] = {
    "weighted_perplexity": lambda sums: math.exp(-sums[0] / sums[1]),
    "bits_per_byte": lambda sums: -sums[0] / sums[1] / math.log(2),
}


def _newcombe(pairs: Sequence[tuple[float, float]], confidence: float) -> Interval:
    """Method 10: Wilson's intervals of both shares, squared and added with the correlation of the pairs."""
    count = len(pairs)
    both, gained = pairs.count((1, 1)), pairs.count((1, 0))
    lost = pairs.count((0, 1))
    neither = count - both - gained - lost
    first, second = (both + gained) / count, (both + lost) / count
    low_1, high_1 = wilson(both + gained, count, confidence)
    low_2, high_2 = wilson(both + lost, count, confidence)
    product = math.prod(((both + gained), (lost + neither), (both + lost), (gained + neither)))
    raw = both * neither - gained * lost
    corrected = max(raw - count / 2, 0.0) if raw > 0 else float(raw)
    phi = corrected / math.sqrt(product) if product else 0.0
    difference = first - second

    def reach(to_first: float, to_second: float) -> float:
        return math.sqrt(max(0.0, to_first**2 - 2 * phi * to_first * to_second + to_second**2))

    return Interval(
        difference,
        difference - reach(first - low_1, high_2 - second),
        difference + reach(high_1 - first, second - low_2),
        confidence,
    )


def _ends(found: Sequence[float], confidence: float) -> tuple[float, float]:
    """Percentiles of resamples, where at least 5 lie beyond each. A confidence beyond that, as where many intervals
    hold together, moves them out from the median as a normal distribution's would: the extremes of so many resamples
    say nothing of what lies beyond them."""
    from trtx.bench.statistics import percentile

    seen = min(confidence, 1 - 2 * _FEWEST_BEYOND / len(found))
    beyond = 50 * (1 - seen)
    low, middle, high = (percentile(found, at) for at in (beyond, 50, 100 - beyond))
    stretch = _two_sided(confidence) / _two_sided(seen)
    return middle - stretch * (middle - low), middle + stretch * (high - middle)


def _two_sided(confidence: float) -> float:
    """Standard deviations to either side that hold this share of a normal distribution."""
    return NormalDist().inv_cdf((1 + confidence) / 2)

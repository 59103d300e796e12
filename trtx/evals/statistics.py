"""Confidence intervals of scores: over samples of a task, and over pairs of samples in two runs.

Wilson (1927, JASA 22:209) for a share; Newcombe (1998, Statistics in Medicine 17:2635), method 10, for the difference
of two shares over the same samples; the percentile bootstrap (Efron and Tibshirani 1993) for everything else. If nearly
all samples have the same value, resamples hardly differ and say nothing about unseen samples. The interval then follows
from how many different samples Wilson's interval admits and how far off they may be. If that distance is unknown, there
is no interval.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, pstdev
from typing import Any

from trtx.config.wording import counted
from trtx.evals.forms import Aggregation
from trtx.stats.intervals import CONFIDENCE, Interval
from trtx.stats.proportions import wilson_interval

RESAMPLES = 1000  # for a mean: 25 beyond each end of a 95 % interval
SLOW_RESAMPLES = 200  # for a metric that is computed over all samples at once, such as BLEU
FEWEST_SAMPLES = 10  # with fewer, bootstrap resamples hardly differ from the sample
# Samples that differ from the most common value; with fewer, resamples hardly differ from each other.
FEWEST_UNLIKE = 10
_FEWEST_BEYOND = 5  # resamples beyond an end of the interval
_SAME_DIGITS = 12  # smaller differences are rounding
_SEED = 20261122


@dataclass(frozen=True, slots=True)
class NoInterval:
    """The reason why a score has no interval."""

    reason: str


def is_binary(values: Sequence[Any]) -> bool:
    return all(value in (0, 1) for value in values)


def share_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's interval of the share of ones among zeros and ones; None without values.

    Its width is never zero: ten right answers of ten prove nothing about the eleventh.
    """
    return _share(values, confidence) if values else None


def score_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | NoInterval:
    """The interval of a mean over samples: Wilson's if all are 0 or 1, else the bootstrap."""
    if values and is_binary(values):
        return _share(values, confidence)
    if len(values) < FEWEST_SAMPLES:
        return _too_few(len(values))
    found = strata_bootstrap([values], [1.0], confidence)
    if unlike(values) >= FEWEST_UNLIKE:
        return found
    reach = max(values) - min(values)
    if not reach:
        return NoInterval(
            f"all {len(values)} samples are worth {values[0]:.4g}, which does not show how far off others may be"
        )
    widened = _widened(found, reach * unseen_share(len(values), confidence))
    if min(values) >= 0 and max(values) <= 1:
        return Interval(widened.estimate, max(widened.low, 0.0), min(widened.high, 1.0), confidence)
    return widened


def bootstrap_interval(
    samples: Sequence[Any],
    statistic: Callable[[list[Any]], float],
    *,
    resamples: int,
    confidence: float = CONFIDENCE,
) -> Interval | NoInterval:
    """The interval of ``statistic`` over independent samples. Equal samples give equal intervals."""
    if len(samples) < FEWEST_SAMPLES:
        return _too_few(len(samples))
    draw = random.Random(_SEED)
    kept = list(samples)
    found = sorted(statistic(draw.choices(kept, k=len(kept))) for _ in range(resamples))
    if unlike(list(map(str, samples))) < FEWEST_UNLIKE or round(found[-1] - found[0], _SAME_DIGITS) == 0:
        return NoInterval(f"{len(samples)} samples are too much alike to show how far off others may be")
    return Interval(statistic(kept), *_ends(found, confidence), confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Bootstrap interval of a mean; None with fewer than 10 values.

    For equal values it is a single point, which describes these values and says nothing about others.
    """
    if len(values) < FEWEST_SAMPLES:
        return None
    return strata_bootstrap([values], [1.0], confidence)


def strata_interval(
    strata: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | NoInterval:
    """The interval of a weighted sum of the means of several tasks, each resampled separately.

    If all samples of a task are equal, resampling finds no spread. In this case the intervals of the tasks are combined
    (Zou and Donner 2008, Statistics in Medicine 27:1693).
    """
    total = sum(map(len, strata))
    if not all(strata):
        return NoInterval("a task of the group has no sample with this metric")
    if total < FEWEST_SAMPLES:
        return _too_few(total)
    if all(map(unlike, strata)) and sum(map(unlike, strata)) >= FEWEST_UNLIKE:
        return strata_bootstrap(strata, weights, confidence)
    found: list[Interval] = []
    for values in strata:
        one = score_interval(values, confidence)
        if isinstance(one, NoInterval):
            return NoInterval(f"of a task of the group, {one.reason}")
        found.append(one)
    estimate = math.fsum(weight * one.estimate for weight, one in zip(weights, found, strict=True))
    below = math.hypot(*(weight * (one.estimate - one.low) for weight, one in zip(weights, found, strict=True)))
    above = math.hypot(*(weight * (one.high - one.estimate) for weight, one in zip(weights, found, strict=True)))
    return Interval(estimate, estimate - below, estimate + above, confidence)


def strata_bootstrap(
    strata: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """The percentile bootstrap of a weighted sum of means, each resampled separately."""
    import numpy as np

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
) -> Interval | NoInterval:
    """The interval of candidate − baseline over the same samples in the same order.

    If nearly all pairs have the same difference, such as 0, unseen pairs are assumed to differ by up to the range of
    the samples.
    """
    pairs = list(zip(candidate, baseline, strict=True))
    if pairs and is_binary(candidate) and is_binary(baseline):
        return _newcombe(pairs, confidence)
    if len(pairs) < FEWEST_SAMPLES:
        return _too_few(len(pairs), "pair")
    differences = [of_candidate - of_baseline for of_candidate, of_baseline in pairs]
    found = strata_bootstrap([differences], [1.0], confidence)
    if unlike(differences) >= FEWEST_UNLIKE:
        return found
    both = [*candidate, *baseline]
    reach = max(max(both) - min(both), max(differences) - min(differences))
    return _widened(found, reach * unseen_share(len(pairs), confidence)) if reach else _all_alike(len(pairs))


def ratio_difference_interval(
    candidate: Sequence[tuple[float, float]],
    baseline: Sequence[tuple[float, float]],
    aggregation: Aggregation,
    confidence: float = CONFIDENCE,
) -> Interval | NoInterval:
    """The interval of candidate − baseline for a score that is a ratio of sums over samples.

    ``candidate`` and ``baseline`` cover the same samples in the same order, each a log-likelihood and its divisor, such
    as a number of words. Pairs are resampled together, so that differences in difficulty between texts cancel out.
    """
    import numpy as np

    if len(candidate) < FEWEST_SAMPLES:
        return _too_few(len(candidate), "pair")
    score = _RATIOS[aggregation]
    draw = np.random.default_rng(_SEED)
    both = [np.asarray(pairs, dtype=float) for pairs in (candidate, baseline)]

    def difference(rows: Any) -> float:
        of_candidate, of_baseline = (score(pairs[rows].sum(axis=0)) for pairs in both)
        return float(of_candidate - of_baseline)

    count = len(candidate)
    found = sorted(difference(draw.integers(0, count, count)) for _ in range(RESAMPLES))
    drawn = Interval(difference(np.arange(count)), *_ends(found, confidence), confidence)
    each = [(pairs[:, 0] / pairs[:, 1]).tolist() for pairs in both]  # log-likelihood per word
    differences = [now - before for now, before in zip(*each, strict=True)]
    if unlike(differences) >= FEWEST_UNLIKE:
        return drawn
    # Log-likelihoods have no lower bound, so the spread of the texts serves as the distance of an unseen one.
    reach = max(pstdev([*each[0], *each[1]]), max(differences) - min(differences))
    if round(reach, _SAME_DIGITS) == 0:
        return _all_alike(count)
    off = reach * unseen_share(count, confidence)
    sums, before = (pairs.sum(axis=0) for pairs in both)
    low, high = (float(score((sums[0] + end * sums[1], sums[1])) - score(before)) for end in (off, -off))
    return Interval(drawn.estimate, min(drawn.low, low), max(drawn.high, high), confidence)


def unlike(values: Sequence[Any]) -> int:
    """The number of values that differ from the most common one."""
    if not values:
        return 0
    rounded = [round(one, _SAME_DIGITS) if isinstance(one, float) else one for one in values]
    ((_, commonest),) = Counter(rounded).most_common(1)
    return len(values) - commonest


def unseen_share(count: int, confidence: float = CONFIDENCE) -> float:
    """The maximum share of samples unlike all ``count`` seen ones: the upper end of Wilson's interval for 0 of
    ``count``.
    """
    return wilson_interval(0, count, confidence)[1]


def _widened(found: Interval, off: float) -> Interval:
    """The interval, extended to at least ``off`` on either side."""
    low, high = min(found.low, found.estimate - off), max(found.high, found.estimate + off)
    return Interval(found.estimate, low, high, found.confidence)


def _share(values: Sequence[float], confidence: float) -> Interval:
    low, high = wilson_interval(sum(values), len(values), confidence)
    return Interval(sum(values) / len(values), low, high, confidence)


def _too_few(count: int, what: str = "sample") -> NoInterval:
    return NoInterval(
        f"{counted(count, what)} {'is' if count == 1 else 'are'} too few for an interval; ask {FEWEST_SAMPLES} or more"
    )


def _all_alike(count: int) -> NoInterval:
    return NoInterval(
        f"all {count} pairs are alike, and so are their samples, which does not show how far off others may be"
    )


# lm-eval's formulas for the sums of log-likelihoods and of their divisors (lm_eval/api/metrics.py, 0.4.13).
_RATIOS: dict[Aggregation, Callable[[Any], float]] = {
    "weighted_perplexity": lambda sums: math.exp(-sums[0] / sums[1]),
    "bits_per_byte": lambda sums: -sums[0] / sums[1] / math.log(2),
}


def _newcombe(pairs: Sequence[tuple[float, float]], confidence: float) -> Interval:
    """Newcombe's method 10: combines Wilson's intervals of both shares, taking the correlation of the pairs into
    account.
    """
    count = len(pairs)
    both, gained = pairs.count((1, 1)), pairs.count((1, 0))
    lost = pairs.count((0, 1))
    neither = count - both - gained - lost
    first, second = (both + gained) / count, (both + lost) / count
    low_1, high_1 = wilson_interval(both + gained, count, confidence)
    low_2, high_2 = wilson_interval(both + lost, count, confidence)
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
    """Percentiles of resamples, for a confidence that leaves at least 5 resamples beyond each end.

    For a higher confidence, as needed for many simultaneous intervals, the ends are moved out from the median as for a
    normal distribution, because the extremes of the resamples say nothing about the tails beyond them.
    """
    from trtx.stats.percentiles import percentile

    seen = min(confidence, 1 - 2 * _FEWEST_BEYOND / len(found))
    beyond = 50 * (1 - seen)
    low, middle, high = (percentile(found, at) for at in (beyond, 50, 100 - beyond))
    stretch = _two_sided(confidence) / _two_sided(seen)
    return middle - stretch * (middle - low), middle + stretch * (high - middle)


def _two_sided(confidence: float) -> float:
    """Number of standard deviations on either side that contain this share of a normal distribution."""
    return NormalDist().inv_cdf((1 + confidence) / 2)

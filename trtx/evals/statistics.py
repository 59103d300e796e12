"""Intervals of scores: over samples of a task, and over pairs of two runs that were asked the same.

Wilson (1927, JASA 22:209) for a share; Newcombe (1998, Statistics in Medicine 17:2635), method 10, for the difference
of two shares of the same samples; the percentile bootstrap (Efron and Tibshirani 1993) for all else. Where nearly all
samples are worth the same, resamples of them hardly differ, and say nothing of what others are worth: then how many
of another kind there may be, by Wilson's interval, and how far off they may be, says it; else there is no interval.
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

RESAMPLES = 1000  # of a mean: 25 beyond each end of a 95 % interval
SLOW_RESAMPLES = 200  # of a metric that is computed over all samples at once, such as BLEU
FEWEST_SAMPLES = 10  # below, a resample of a bootstrap is hardly another sample
FEWEST_UNLIKE = 10  # samples that differ from the commonest; below, a resample hardly differs from the next
_FEWEST_BEYOND = 5  # resamples beyond an end that is read off them
_SAME_DIGITS = 12  # what differs by less is rounding
_SEED = 20261122


@dataclass(frozen=True, slots=True)
class NoInterval:
    """Why nothing is known of how far off a score may be."""

    reason: str


def is_binary(values: Sequence[Any]) -> bool:
    return all(value in (0, 1) for value in values)


def share_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's, of the share of ones in zeros and ones; None for no values. Never of width zero: all of ten right is
    no proof of the eleventh."""
    return _share(values, confidence) if values else None


def score_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | NoInterval:
    """Of the mean of samples: Wilson's where all are 0 or 1, else the bootstrap."""
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
    """Of ``statistic`` over independent samples. Equal samples give equal intervals."""
    if len(samples) < FEWEST_SAMPLES:
        return _too_few(len(samples))
    draw = random.Random(_SEED)
    kept = list(samples)
    found = sorted(statistic(draw.choices(kept, k=len(kept))) for _ in range(resamples))
    if unlike(list(map(str, samples))) < FEWEST_UNLIKE or round(found[-1] - found[0], _SAME_DIGITS) == 0:
        return NoInterval(f"{len(samples)} samples are too much alike to show how far off others may be")
    return Interval(statistic(kept), *_ends(found, confidence), confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Bootstrap of a mean; None for fewer than 10. Of values that are all alike it is a point: what these are worth,
    and nothing of others."""
    if len(values) < FEWEST_SAMPLES:
        return None
    return strata_bootstrap([values], [1.0], confidence)


def strata_interval(
    strata: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | NoInterval:
    """Of the weighted sum of the means of several tasks, each resampled by itself.

    Where a task's samples are all alike, resamples of it do not differ: then the intervals of the tasks are put
    together (Zou and Donner 2008, Statistics in Medicine 27:1693).
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
    """The percentile bootstrap of a weighted sum of means, each of them resampled by itself."""
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
    """Of candidate − baseline, of the same samples in the same order.

    Where nearly all pairs differ by the same, such as by nothing, others may differ by as much as samples do.
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
    """Of candidate − baseline of a score that is made of sums over samples.

    ``candidate``, ``baseline``: of the same samples in the same order, each a log-likelihood and what it is divided by,
    such as words. Samples are drawn in pairs, so what makes one text harder than another is in both, and falls out.
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
    each = [(pairs[:, 0] / pairs[:, 1]).tolist() for pairs in both]  # log-likelihood a word
    differences = [now - before for now, before in zip(*each, strict=True)]
    if unlike(differences) >= FEWEST_UNLIKE:
        return drawn
    # No log-likelihood is the least: how far texts differ from one another takes the place of how far one may.
    reach = max(pstdev([*each[0], *each[1]]), max(differences) - min(differences))
    if round(reach, _SAME_DIGITS) == 0:
        return _all_alike(count)
    off = reach * unseen_share(count, confidence)
    sums, before = (pairs.sum(axis=0) for pairs in both)
    low, high = (float(score((sums[0] + end * sums[1], sums[1])) - score(before)) for end in (off, -off))
    return Interval(drawn.estimate, min(drawn.low, low), max(drawn.high, high), confidence)


def unlike(values: Sequence[Any]) -> int:
    """How many are another than the commonest."""
    if not values:
        return 0
    rounded = [round(one, _SAME_DIGITS) if isinstance(one, float) else one for one in values]
    ((_, commonest),) = Counter(rounded).most_common(1)
    return len(values) - commonest


def unseen_share(count: int, confidence: float = CONFIDENCE) -> float:
    """How many of all samples may be of a kind that none of ``count`` is: the upper end of Wilson's interval."""
    return wilson_interval(0, count, confidence)[1]


def _widened(found: Interval, off: float) -> Interval:
    """At least ``off`` to either side."""
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
    """Percentiles of resamples, where at least 5 lie beyond each. A confidence beyond that, as where many intervals
    hold together, moves them out from the median as a normal distribution's would: the extremes of so many resamples
    say nothing of what lies beyond them."""
    from trtx.stats.percentiles import percentile

    seen = min(confidence, 1 - 2 * _FEWEST_BEYOND / len(found))
    beyond = 50 * (1 - seen)
    low, middle, high = (percentile(found, at) for at in (beyond, 50, 100 - beyond))
    stretch = _two_sided(confidence) / _two_sided(seen)
    return middle - stretch * (middle - low), middle + stretch * (high - middle)


def _two_sided(confidence: float) -> float:
    """Standard deviations to either side that hold this share of a normal distribution."""
    return NormalDist().inv_cdf((1 + confidence) / 2)

"""Metrics over all sequences of a topology, with confidence intervals over prompts.

Tokens of one prompt depend on each other, while prompts are independent. The bootstrap therefore resamples whole
prompts (cluster bootstrap; Davison and Hinkley 1997, Bootstrap Methods and their Application, 3.8), and a metric is the
ratio of two sums over prompts. Intervals are 95 % percentile intervals of 1,000 resamples. If nearly all prompts have
the same value, resamples hardly differ. Then the interval allows for as many different prompts as Wilson's interval
admits, each ``reach`` away from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import pstdev

from trtx.evals.fidelity.forms import ComparedSequence, MeanOverPositions, Part, PartFigures
from trtx.evals.statistics import FEWEST_SAMPLES, FEWEST_UNLIKE, RESAMPLES, unlike, unseen_share
from trtx.stats.intervals import CONFIDENCE, Interval
from trtx.stats.percentiles import percentile

_SEED = 20261122


def part_figures(sequences: Sequence[ComparedSequence], part: Part) -> PartFigures | None:
    """The metrics of ``part``; None if no sequence has a position in it."""
    held = [one for one in sequences if one.kl[one.positions(part)]]
    if not held:
        return None
    counts = [len(one.kl[one.positions(part)]) for one in held]

    def sums(of: Callable[[ComparedSequence], Sequence[float]]) -> list[float]:
        return [math.fsum(of(one)[one.positions(part)]) for one in held]

    reference, served = sums(lambda one: one.reference_logprob), sums(lambda one: one.served_logprob)
    lost = [before - after for before, after in zip(reference, served, strict=True)]
    positions = sum(counts)
    # A divergence is unbounded, so the spread of the prompts' likelihoods serves as the distance of an unseen prompt.
    reach = pstdev([one / count for one, count in zip(reference, counts, strict=True)])
    return PartFigures(
        part=part,
        positions=positions,
        kl=mean_figure(sums(lambda one: one.kl), counts, reach=reach, least=0.0),
        agreement=share_figure(sums(lambda one: one.agrees), counts),
        shared=math.fsum(sums(lambda one: one.shared)) / positions,
        reference_perplexity=_perplexity(reference, positions),
        served_perplexity=_perplexity(served, positions),
        perplexity_increase_pct=mean_figure(
            lost, counts, lambda loss: 100 * math.expm1(min(loss, _LARGEST)), reach=reach
        ),
    )


def mean_figure(
    sums: Sequence[float],
    counts: Sequence[int],
    of: Callable[[float], float] = lambda mean: mean,
    *,
    reach: float,
    least: float = -math.inf,
    most: float = math.inf,
) -> MeanOverPositions:
    """``of`` (a monotone function) applied to the mean over positions, with its interval.

    ``sums`` and ``counts`` are per prompt, over its positions. ``reach``: assumed distance of an unseen prompt's mean
    from the others, for prompts that hardly differ. ``least`` and ``most``: bounds of any mean.
    """
    import numpy as np

    mean = math.fsum(sums) / sum(counts)
    value = of(mean)
    if len(sums) < FEWEST_SAMPLES:
        return MeanOverPositions(value, None)
    draw = np.random.default_rng(_SEED).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = np.asarray(sums, dtype=float)[draw].sum(axis=1) / np.asarray(counts, dtype=float)[draw].sum(axis=1)
    beyond = 50 * (1 - CONFIDENCE)
    low, high = (percentile(means.tolist(), end) for end in (beyond, 100 - beyond))
    each = [one / count for one, count in zip(sums, counts, strict=True)]
    if unlike(each) < FEWEST_UNLIKE:
        reach = max(reach, max(each) - min(each))
        if not reach:
            return MeanOverPositions(value, None)
        off = reach * unseen_share(len(each))
        low, high = max(least, min(low, mean - off)), min(most, max(high, mean + off))
    return MeanOverPositions(value, Interval(value, of(low), of(high), CONFIDENCE))


def share_figure(sums: Sequence[float], counts: Sequence[int]) -> MeanOverPositions:
    """A share of positions. In a prompt unlike the others, all positions may differ."""
    return mean_figure(sums, counts, reach=1.0, least=0.0, most=1.0)


_LARGEST = 700.0  # e^710 overflows a float


def _perplexity(logprobs: Sequence[float], positions: int) -> float:
    return math.exp(min(-math.fsum(logprobs) / positions, _LARGEST))

r"""Lower bound on the divergence, at one position, of two engines that report only their most likely tokens.

p is the reference's distribution, q the served one's; KL(p ‖ q) = Σ p ln(p/q), in nats. Each side reports the
position's own token and its k most likely tokens. The vocabulary is partitioned into:

- each token that both report, by itself;
- M, all tokens that the reference reports and the served engine doesn't, together;
- T, all other tokens, together.

Coarsening two distributions in the same way can't increase their divergence (log-sum or data-processing inequality:
Cover and Thomas, Elements of Information Theory, 2nd ed., 2.7.1 and 2.8.1). The probability of M under q is not
reported. It is at most the probability that q leaves for tokens other than the common ones, and at most |M| times the
smallest of q's k highest probabilities, because no token of M is more likely than that. Within these limits, the value
with the smallest divergence is used. :func:`compare` therefore never overstates the divergence. There is no upper
bound, because an unreported probability can be arbitrarily small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ROUNDING = 1e-6
"""Error bound for a sum of 20 probabilities from float32 log-probabilities. A smaller remainder is rounded up to it."""


@dataclass(frozen=True, slots=True)
class PositionComparison:
    """The comparison at one position.

    ``kl``: lower bound on the divergence of the served distribution from the reference's, in nats. ``agrees``: the most
    likely token is the same; with ties, at least one is. ``shared``: the reference's probability of the tokens that
    both report, 0 to 1, which are compared individually.
    """

    kl: float
    agrees: bool
    shared: float


def compare(reference: Mapping[int, float], served: Mapping[int, float], top: int) -> PositionComparison:
    """Compares natural log-probabilities by token. Each side has at least its ``top`` most likely tokens."""
    both = reference.keys() & served.keys()
    missing = reference.keys() - both
    p, q = ({token: math.exp(row[token]) for token in both} for row in (reference, served))
    p_missing = math.fsum(math.exp(reference[token]) for token in missing)
    shared = math.fsum(p.values())
    p_rest, q_left = max(0.0, 1 - shared - p_missing), max(0.0, 1 - math.fsum(q.values()))
    kl = math.fsum(p[token] * (reference[token] - served[token]) for token in both if p[token])
    if p_missing:
        most = min(q_left, len(missing) * _least_of(served, top))
        q_missing = min(most, q_left * p_missing / (p_missing + p_rest))
        kl += _term(p_missing, q_missing)
        q_left -= q_missing
    kl += _term(p_rest, q_left)
    return PositionComparison(max(0.0, kl), _agree(reference, served), min(1.0, shared))


def _term(p: float, q: float) -> float:
    """The contribution p ln(p/q) of one part."""
    return p * math.log(p / max(q, ROUNDING)) if p else 0.0


def _least_of(row: Mapping[int, float], top: int) -> float:
    """Upper bound on the probability of any unreported token; 1 if fewer than ``top`` are reported."""
    ordered = sorted(row.values(), reverse=True)
    return math.exp(ordered[top - 1]) if len(ordered) >= top > 0 else 1.0


def _agree(reference: Mapping[int, float], served: Mapping[int, float]) -> bool:
    likeliest, most = max(reference.values()), max(served.values())
    return any(served.get(token) == most for token, logprob in reference.items() if logprob == likeliest)

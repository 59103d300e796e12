r"""What two engines that show their likeliest tokens alone say of their divergence at one position.

p is the reference's distribution, q the served one's; KL(p ‖ q) = Σ p ln(p/q), in nats. Each side shows the position's
own token and its k likeliest. The vocabulary is cut into three kinds of parts:

- each token that both show, by itself;
- M, all tokens that the reference shows and the served engine does not, together;
- T, all other tokens, together.

The divergence of two distributions that are coarsened in the same way is at most their own (the log-sum inequality, or
data-processing inequality: Cover and Thomas, Elements of Information Theory, 2nd ed., 2.7.1 and 2.8.1). What q gives
to M is not shown. It is at most what q leaves beside the tokens that both show, and at most |M| times the least of its
k likeliest, as no token of M is likelier than that; within this, the value with the least divergence is taken. So
:func:`compare` never overstates. There is no upper bound: a probability that is not shown can be as small as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ROUNDING = 1e-6
"""What a sum of 20 probabilities may be wrong by, of float32 log-probabilities: a smaller rest counts as so large."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One position.

    ``kl``: nats, at most the true divergence of the served distribution from the reference's. ``agrees``: the likeliest
    token is the same; of equally likely ones, one at least is. ``shared``: the reference's probability of the tokens
    that both show, 0 to 1, which were compared one by one.
    """

    kl: float
    agrees: bool
    shared: float


def compare(reference: Mapping[int, float], served: Mapping[int, float], top: int) -> Compared:
    """``reference``, ``served``: natural log-probabilities by token, the ``top`` likeliest and others beside them."""
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
    return Compared(max(0.0, kl), _agree(reference, served), min(1.0, shared))


def _term(p: float, q: float) -> float:
    """p ln(p/q) of a part."""
    return p * math.log(p / max(q, ROUNDING)) if p else 0.0


def _least_of(row: Mapping[int, float], top: int) -> float:
    """The probability that no token which is not shown exceeds; 1 where fewer than ``top`` are shown."""
    ordered = sorted(row.values(), reverse=True)
    return math.exp(ordered[top - 1]) if len(ordered) >= top > 0 else 1.0


def _agree(reference: Mapping[int, float], served: Mapping[int, float]) -> bool:
    likeliest, most = max(reference.values()), max(served.values())
    return any(served.get(token) == most for token, logprob in reference.items() if logprob == likeliest)

"""How far two answers to one prompt are from each other, in natural logarithms of probabilities.

At one position both sides say the likeliest tokens. The distance there is the largest of |Δ| over the tokens that both
name; a token that one side names alone is, on the other, no likelier than the last that it does name, and is that far
off at least. So two sides that choose differently are as near as rounding is only where the choice was a tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtx.evals.parity.forms import Answer


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one request. Positions are compared up to the first where tokens differ, and that one too: all of them had the
    same tokens before them."""

    answer: tuple[float, ...]  # by position
    prompt: tuple[float, ...]  # by position from the second token on; none where not both sides say
    divergence: int | None  # the first position of the answer with another token; None: there is none

    @property
    def mean(self) -> float:
        """Over all positions of both; 0 for none."""
        values = self.answer + self.prompt
        return sum(values) / len(values) if values else 0.0


def distance(reference: Answer, other: Answer) -> Distance:
    """Both whole, with as many ``logprobs`` and ``top`` as tokens. One that ends earlier diverges at its end."""
    found: list[float] = []
    divergence = None
    for position, tokens in enumerate(zip(reference.token_ids, other.token_ids, strict=False)):
        found.append(_between(_named(reference, position), _named(other, position)))
        if tokens[0] != tokens[1]:
            divergence = position
            break
    shorter = min(len(reference.token_ids), len(other.token_ids))
    if divergence is None and len(reference.token_ids) != len(other.token_ids):
        divergence = shorter
    told = len(reference.prompt_logprobs) == len(other.prompt_logprobs)
    pairs = zip(reference.prompt_logprobs, other.prompt_logprobs, strict=True) if told else ()
    return Distance(tuple(found), tuple(abs(one - two) for one, two in pairs), divergence)


def _named(answer: Answer, position: int) -> Mapping[str, float]:
    return {**answer.top[position], str(answer.token_ids[position]): answer.logprobs[position]}


def _between(one: Mapping[str, float], two: Mapping[str, float]) -> float:
    both = [abs(one[token] - two[token]) for token in one.keys() & two.keys()]
    alone = [_beyond(one, two), _beyond(two, one)]
    return max([*both, *alone])


def _beyond(named: Mapping[str, float], others: Mapping[str, float]) -> float:
    """How far the tokens that ``others`` lacks are off at least."""
    least = min(others.values())
    return max([0.0, *(value - least for token, value in named.items() if token not in others)])

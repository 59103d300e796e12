"""The distance between two answers to one prompt: differences of logprobs (natural logarithms).

Both sides report the logprobs of the most likely tokens of each position. The distance at a position is the largest
difference over the tokens that both sides report. If only one side reports a token, then on the other side it is at
most as likely as the least likely reported token, which gives a lower bound on the difference. So if the two sides
chose different tokens, their distance is as small as a rounding error only if the two tokens were equally likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtx.evals.parity.forms import ParityAnswer


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between the two answers to one request.

    Positions are compared up to and including the first one with different tokens, so that the preceding tokens are the
    same on both sides.
    """

    answer: tuple[float, ...]  # by position
    prompt: tuple[float, ...]  # by position from the second token on; empty unless both sides report them
    divergence: int | None  # first position of the answers with different tokens; None: there is none

    @property
    def mean(self) -> float:
        """The mean over all positions of answer and prompt; 0 without any."""
        values = self.answer + self.prompt
        return sum(values) / len(values) if values else 0.0


def distance(reference: ParityAnswer, other: ParityAnswer) -> Distance:
    """The distance between two complete answers. If one is a prefix of the other, they diverge at its end."""
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


def _named(answer: ParityAnswer, position: int) -> Mapping[str, float]:
    return {**answer.top[position], str(answer.token_ids[position]): answer.logprobs[position]}


def _between(one: Mapping[str, float], two: Mapping[str, float]) -> float:
    both = [abs(one[token] - two[token]) for token in one.keys() & two.keys()]
    alone = [_beyond(one, two), _beyond(two, one)]
    return max([*both, *alone])


def _beyond(named: Mapping[str, float], others: Mapping[str, float]) -> float:
    """A lower bound on the difference for the tokens in ``named`` that ``others`` lacks; 0 if it lacks none."""
    least = min(others.values())
    return max([0.0, *(value - least for token, value in named.items() if token not in others)])

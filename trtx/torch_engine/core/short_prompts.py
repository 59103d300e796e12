"""How short prompts pass a long one, so that a document of 100,000 tokens does not stop the chat messages behind it.

Prompts are computed in the order of their arrival. While the first one in progress is long, up to half of a step's
prompt tokens go to short prompts behind it, in the order of their arrival. Two bounds follow:

- A long prompt takes at most twice as many steps as it would take alone, because it gets the other half.
- A short prompt waits only for short prompts before it, at half of the budget, however many long ones there are.

Equal prompts never pass each other, so their order, and the mean time to the first token with it, stays as it was.
"""

from __future__ import annotations

from trtx.torch_engine.core.sequence import Sequence

_LONG_STEPS = 2
"""A prompt is long while it needs more than so many steps of the whole prompt budget."""
_SHORT_PART = 4
"""A prompt is short beside a long one if its own rest is at most this fraction of the long one's: 1 / 4."""
LOOKED_AT = 16
"""Waiting sequences, from the first one on, among which short ones are looked for. It bounds the work of a step."""


def left_to_short(first: Sequence, budget: int) -> int:
    """Returns the tokens of a step's ``budget`` that short prompts may take before ``first``, a prompt in progress."""
    return budget // 2 if first.num_uncomputed > _LONG_STEPS * budget else 0


def most_of_short(first: Sequence) -> int:
    """Returns the most uncomputed tokens of a prompt that is short beside ``first``."""
    return first.num_uncomputed // _SHORT_PART

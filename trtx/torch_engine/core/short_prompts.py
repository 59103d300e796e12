"""How short prompts pass a long one, so that a document of 100,000 tokens does not stop the chat messages behind it.

Prompts are computed in the order of their arrival. While the first one in progress is long, up to half of a step's
prompt tokens go to short prompts behind it, in the order of their arrival. Two bounds follow:

- A long prompt takes at most twice as many steps as without short ones, because it gets the other half.
- A short prompt waits only for the short prompts before it, and these get half of the budget. This holds while the
  short prompt is among the first :data:`LOOKED_AT` waiting sequences, has at least the priority of the first waiting
  sequence, and leaves a slot and blocks for that sequence.

Prompts of equal length never pass each other, so a load of such prompts runs as if there were no such rule.
"""

from __future__ import annotations

from trtx.torch_engine.core.sequence import Sequence

_LONG_STEPS = 2
"""A prompt is long while it needs more than this many steps at the whole prompt budget."""
_SHORT_PART = 4
"""A prompt is short if its uncomputed tokens are at most one in this many of the long prompt's."""
LOOKED_AT = 16
"""Number of waiting sequences that a step searches for short prompts. It bounds the scheduler's work."""


def left_to_short(first: Sequence, budget: int) -> int:
    """Returns how many tokens of a step's ``budget`` go to short prompts before ``first``, a prompt in progress."""
    return budget // 2 if first.num_uncomputed > _LONG_STEPS * budget else 0


def most_of_short(first: Sequence) -> int:
    """Returns how many uncomputed tokens a prompt may have to count as short beside the long prompt ``first``."""
    return first.num_uncomputed // _SHORT_PART

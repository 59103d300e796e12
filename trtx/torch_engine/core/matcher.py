"""One sequence's place in its grammar: which tokens may follow, and when the text is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.sampling_plan import SamplingPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Mask = npt.NDArray[np.int32]  # [words]: bit t is 1 if token t may be sampled
_ALL = np.int32(-1)
SHOWN_CHARACTERS = 300
"""Maximum length of a library's message in an error text."""


class GrammarProblem(Exception):
    """A request can't follow its grammar; the text is for the client."""


class TokenMatcher:
    """Follows a sequence through its grammar. It stays with the sequence through preemption.

    While the model thinks (see :class:`trtx.torch_engine.sampling_plan.Grammar`), every token is allowed but those that
    end the sequence. Afterwards, the sequence's own end and stop ids are allowed exactly where the text may end. So a
    sequence that ends by a token always ends with a complete text.
    """

    def __init__(self, compiled: LLMatcher, plan: SamplingPlan, eos_ids: frozenset[int], vocab_size: int) -> None:
        """``compiled``: at the beginning of the grammar, and owned by this object. It allows ``eos_ids`` to end it."""
        assert plan.grammar is not None
        self.compiled = compiled
        self.is_complete = False
        """The text is complete and nothing may follow, not even an end token: found while the mask was computed."""
        self.problem = ""
        """Why the sequence can't go on; for the client."""
        self._after, self._opens = plan.grammar.after, plan.grammar.opens
        self.thinks = self._after is not None and self._opens is None
        ends = {*plan.end_ids, *plan.stop_ids}
        self._ends = tuple(token for token in ends if 0 <= token < vocab_size)
        self._added = tuple(token for token in self._ends if token not in eos_ids)
        self._removed = tuple(eos_ids - ends)
        self._min_tokens = plan.min_tokens

    def accept(self, token_id: int) -> bool:
        """Takes a sampled token that ends nothing by itself. Returns whether the text is complete.

        Raises GrammarProblem for a token that the grammar excludes: a prefill worker has sampled it with another
        grammar.
        """
        may_open, self._opens = self._opens, None
        if self.thinks:
            self.thinks = token_id != self._after
            return False
        if token_id == may_open:
            self.thinks = True
            return False
        if not self.compiled.consume_token(token_id):
            raise GrammarProblem(f"token {token_id} does not follow the grammar: {_shown(self.compiled)}")
        return self.compiled.is_stopped()

    def finish_mask(self, mask: Mask) -> None:
        """Completes ``mask``, which the library has filled unless the model thinks."""
        if self.thinks:
            mask.fill(_ALL)
            _clear(mask, self._ends)
            return
        if self.compiled.is_stopped():
            if self.compiled.is_error():
                self.problem = f"the grammar can't be followed further: {_shown(self.compiled)}"
            else:
                self.is_complete = True
            mask.fill(_ALL)
            return
        if self._opens is not None:
            _set(mask, (self._opens,))
        if self._added or self._removed:
            may_end = self.compiled.is_accepting()
            _clear(mask, self._removed)
            (_set if may_end else _clear)(mask, self._added)
            if may_end and not mask.any():
                self.is_complete = True
                mask.fill(_ALL)

    def why_no_token(self, num_tokens: int) -> str:
        """Why no token could be sampled after ``num_tokens`` tokens."""
        if num_tokens < self._min_tokens and self.compiled.is_accepting():
            return (
                f"the grammar's text is complete after {num_tokens} tokens, and min_tokens is {self._min_tokens}; "
                "lower min_tokens or leave it out"
            )
        return (
            f"no token of the model continues the grammar's text after {num_tokens} tokens; "
            "check the grammar: it may permit no text that this model's tokens can spell"
        )


def write_masks(executor: LLExecutor, matchers: Sequence[TokenMatcher], masks: npt.NDArray[np.int32]) -> None:
    """Writes the tokens that ``matchers[i]`` allows next to ``masks[i]``; the library's threads share the work."""
    active = [(matcher.compiled, row) for row, matcher in enumerate(matchers) if not matcher.thinks]
    if active:
        words = masks.shape[1]
        executor.unsafe_compute_mask_ptr(active, masks.ctypes.data, words * masks.itemsize, masks.shape[0])
    for row, matcher in enumerate(matchers):
        matcher.finish_mask(masks[row])


def _shown(compiled: LLMatcher) -> str:
    return compiled.get_error().split("\n", 1)[0][:SHOWN_CHARACTERS] or compiled.stop_reason()


def _set(mask: Mask, tokens: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def _clear(mask: Mask, tokens: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token in tokens:
        bits[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))

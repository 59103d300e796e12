"""One sequence's place in its grammar: which tokens may follow, and when the text is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.core.grammar_errors import is_exhausted, readable
from trtx.torch_engine.sampling_plan import SamplingPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Mask = npt.NDArray[np.int32]  # [words]: bit t is 1 if token t may be sampled
_ALL = np.int32(-1)
_TOKENS_BETWEEN_RESTARTS = 100


class GrammarProblem(Exception):
    """A request can't follow its grammar; the text is for the client."""


class TokenMatcher:
    """Follows a sequence through its grammar. It stays with the sequence through preemption.

    While the model thinks (see :class:`trtx.torch_engine.sampling_plan.Grammar`), every token is allowed except those
    that end the sequence. Afterwards, the sequence's own end and stop ids are allowed exactly where the text may end.
    So a sequence that ends by a token always ends with a complete text.
    """

    def __init__(self, source: LLMatcher, plan: SamplingPlan, eos_ids: frozenset[int], vocab_size: int) -> None:
        """``source``: a library matcher at the beginning of the grammar; it stays there. Its grammar allows ``eos_ids``
        to end the text.
        """
        assert plan.grammar is not None
        self.source = source
        self.compiled = source.deep_copy()
        self.grammar = plan.grammar
        self.is_complete = False
        """The text is complete and nothing may follow, not even an end token: found while the mask was computed."""
        self.problem = ""
        """Returns why the sequence can't go on; for the client."""
        self.is_exhausted = False
        """The states that ``source`` may have are used up. All copies of it share them: see :meth:`restart`."""
        self._after, self._opens = plan.grammar.after, plan.grammar.opens
        self.thinks = self._after is not None and self._opens is None
        ends = {*plan.end_ids, *plan.stop_ids}
        self._ends = tuple(token for token in ends if 0 <= token < vocab_size)
        self._added = tuple(token for token in self._ends if token not in eos_ids)
        self._removed = tuple(eos_ids - ends)
        self._min_tokens = plan.min_tokens
        self._num_tokens = 0  # sampled, those of the thinking included
        self._taken: list[int] = []  # tokens of the grammar's text
        self._restarted_at = -_TOKENS_BETWEEN_RESTARTS  # in tokens of the grammar's text

    def fork(self) -> TokenMatcher:
        """A matcher at the same place, which goes on independently."""
        other = copy(self)
        other.compiled = self.compiled.deep_copy()
        other._taken = list(self._taken)
        return other

    def accept(self, token_id: int) -> bool:
        """Follows a sampled token that does not end the sequence by itself. Returns whether the text is complete.

        Raises GrammarProblem for a token that the grammar excludes. This happens if a prefill worker sampled the token
        with another grammar.
        """
        self._num_tokens += 1
        may_open, self._opens = self._opens, None
        if self.thinks:
            self.thinks = token_id != self._after
            return False
        if token_id == may_open:
            self.thinks = True
            return False
        self._taken.append(token_id)
        if self.is_exhausted:  # restart takes it
            return False
        if not self.compiled.consume_token(token_id):
            said = self.compiled.get_error()
            self.is_exhausted = is_exhausted(said)
            if self.is_exhausted:
                return False
            raise GrammarProblem(f"token {token_id} does not follow the grammar: {readable(said)}")
        return self.compiled.is_stopped()

    def restart(self, source: LLMatcher) -> None:
        """Continues in a copy of a newly compiled ``source``, unless the last restart was very recent."""
        assert self.is_exhausted
        tokens, compiled = len(self._taken), source.deep_copy()
        if tokens - self._restarted_at < _TOKENS_BETWEEN_RESTARTS or not compiled.consume_tokens(self._taken):
            return
        self.source, self.compiled, self._restarted_at = source, compiled, tokens
        self.is_exhausted = False

    def finish_mask(self, mask: Mask) -> None:
        """Completes ``mask``. The library has filled it, unless the model is thinking."""
        if self.thinks:
            mask.fill(_ALL)
            _clear(mask, self._ends)
            return
        if self.compiled.is_error():
            said = self.compiled.get_error()
            self.is_exhausted = is_exhausted(said)
            self.problem = f"the grammar can't be followed further: {readable(said)}"
            mask.fill(_ALL)
            return
        self.problem = ""
        if self.compiled.is_stopped():
            mask.fill(0)
            self._complete(mask)
            return
        if self._opens is not None:
            _set(mask, (self._opens,))
        may_end = self.compiled.is_accepting()
        _clear(mask, self._removed)
        (_set if may_end else _clear)(mask, self._added)
        if self._num_tokens < self._min_tokens:
            _clear(mask, self._ends)
        if not mask.any():
            if may_end:
                self._complete(mask)
            else:
                self.problem = (
                    f"no token of the model continues the grammar's text after {self._num_tokens} tokens; check the "
                    "grammar: it may permit no text that this model's tokens can spell"
                )

    def _complete(self, mask: Mask) -> None:
        """Handles a complete text: nothing may follow, so the sequence ends without another token if it has
        ``min_tokens``.
        """
        mask.fill(_ALL)
        if self._num_tokens < self._min_tokens:
            self.problem = self.too_short()
        else:
            self.is_complete = True

    def too_short(self) -> str:
        return (
            f"the grammar's text is complete after {self._num_tokens} tokens, and min_tokens is {self._min_tokens}; "
            "lower min_tokens or leave it out"
        )


def write_masks(executor: LLExecutor, matchers: Mapping[int, TokenMatcher], masks: npt.NDArray[np.int32]) -> None:
    """Writes the tokens that each matcher allows next to its row of ``masks``; the library's threads share the work."""
    active = [(matcher.compiled, row) for row, matcher in matchers.items() if not matcher.thinks]
    if active:
        words = masks.shape[1]
        executor.unsafe_compute_mask_ptr(active, masks.ctypes.data, words * masks.itemsize, masks.shape[0])
    for row, matcher in matchers.items():
        matcher.finish_mask(masks[row])


def _set(mask: Mask, tokens: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def _clear(mask: Mask, tokens: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token in tokens:
        bits[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))

"""A drafter whose acceptance is set by construction: it knows the tokens that will be sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtx.torch_engine.core.speculation.drafters import NO_DRAFT, Draft, DraftState


@dataclass
class KnownTokens:
    tokens: list[int] = field(default_factory=list)


class KnowingDrafter:
    """Drafts each token of the ``known`` sequences (prompt and answer) with probability ``right``, else another."""

    def __init__(self, known: Sequence[list[int]], *, right: float, vocab_size: int, seed: int = 0) -> None:
        self._known = known
        self._right = right
        self._vocab_size = vocab_size
        self._dice = random.Random(seed)

    def begin(self, cache_salt: str | None) -> KnownTokens:
        return KnownTokens()

    def draft(self, state: DraftState, most: int) -> Draft:
        length = len(state.tokens)
        whole = next((one for one in self._known if one[:length] == state.tokens), None)
        if whole is None or length == len(whole):
            return NO_DRAFT
        return Draft([self._maybe(token) for token in whole[length : length + most]], 1)

    def _maybe(self, token: int) -> int:
        return token if self._dice.random() < self._right else (token + 1) % self._vocab_size

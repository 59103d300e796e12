"""Drafters whose acceptance is set by construction: they know the tokens that will be sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtx.torch_engine.core.speculation.drafters import NO_DRAFT, Draft, DraftState
from trtx.torch_engine.drafting import DraftModel, DraftShare


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


class KnowingModel:
    """A draft model that does all of its work, and replaces each token that it drafts with probability ``right``.

    The new token is that of the first of the ``known`` sequences that agrees with the tokens of the draft's share.
    """

    def __init__(self, model: DraftModel, known: Sequence[list[int]], *, right: float, seed: int = 0) -> None:
        self.token_shift, self.room, self.pools = model.token_shift, model.room, model.pools
        self._model, self._known, self._right = model, known, right
        self._dice = random.Random(seed)

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        return [self._replaced(share, own) for share, own in zip(shares, self._model.draft(shares), strict=True)]

    def _replaced(self, share: DraftShare, own: list[int]) -> list[int]:
        begin = share.start + self.token_shift
        end = begin + len(share.tokens)
        whole = next((one for one in self._known if one[begin:end] == share.tokens), [])
        right = whole[end : end + len(own)]
        return [
            right[at] if at < len(right) and self._dice.random() < self._right else token
            for at, token in enumerate(own)
        ]

"""Where the drafts of a step come from: the contract, and drafters that look tokens up on the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol, cast

from trtx.torch_engine.core.draft_kv import DraftKv
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.drafters import NO_DRAFT, Draft, Drafter, DraftState


class DraftSource(Protocol):
    """Drafts for the decoding sequences of one step, in two calls: a cheap outlook, and then the tokens."""

    @property
    def kv(self) -> DraftKv | None:
        """What is known of a draft model's KV; None without such a model."""

    def outlook(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[Draft]:
        """Returns what can be drafted for each sequence, at most ``most[i]`` tokens, without work on the device.

        The lengths and strengths are final; the tokens may be placeholders.
        """

    def draft(self, chosen: SequenceOf[tuple[Sequence, Draft, int]]) -> list[list[int]]:
        """Returns the tokens to verify for each (sequence, its outlook, number of tokens).

        Each sequence has blocks for that number of tokens after its known tokens. A result may have fewer tokens.
        """

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learns how many drafted tokens of a sequence were accepted."""


class LookupDrafts:
    """Drafts that a :class:`Drafter` finds among known tokens."""

    kv: None = None

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def outlook(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[Draft]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, most, strict=True)]

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        if most < 1:
            return NO_DRAFT
        state = sequence.drafting
        if state is None:
            state = sequence.drafting = self._drafter.begin(sequence.cache_salt)
        known = cast(DraftState, state)
        known.tokens += sequence.tokens(len(known.tokens), sequence.num_known)
        return self._drafter.draft(known, most)

    def draft(self, chosen: SequenceOf[tuple[Sequence, Draft, int]]) -> list[list[int]]:
        return [draft.tokens[:length] for _, draft, length in chosen]

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        return None

"""Contract between the source of drafts (policy) and a draft model (tensors). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DraftShare:
    """One sequence's share of a draft: ``tokens`` to compute at positions from ``start`` on, then ``count`` to draft.

    ``is_first``: the first share since the sequence took its slot. ``block_ids``: the sequence's own lists, which grow,
    one for each KV cache group; the draft KV lies in the blocks of the first group.
    """

    slot: int
    is_first: bool
    block_ids: list[list[int]]
    start: int
    tokens: list[int]
    count: int


class DraftModel(Protocol):
    """A model that drafts. ``token_shift``: position p computes token p + ``token_shift`` of the sequence.

    With 1, the model also reads the target model's features at p, so it needs the token that was sampled there.
    ``room``: the largest number of positions of a sequence.
    """

    token_shift: int
    room: int

    @property
    def pools(self) -> Sequence[torch.Tensor]:
        """The draft model's memory for each block of the engine's pool: contiguous tensors ``[num_blocks, ...]``."""

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        """Writes the KV of all tokens, and returns ``count`` greedy tokens for each share. Waits for the device."""

"""Drafts that a model computes: which part of the draft model's KV is still valid, and what its next pass has to
compute.

The draft model's KV cache has the block ids of the engine's pool: the KV of a position lies in the block of the first
KV cache group that holds the position there. So draft KV needs no allocation of its own, and a prefix hit finds it too.
A wrong entry costs acceptance, never a token: each drafted token is verified.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from trtx.torch_engine.core.draft_kv import DraftKv
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.drafters import Draft
from trtx.torch_engine.drafting import DraftModel, DraftShare
from trtx.torch_engine.step import ScheduledSequence

_UNKNOWN = -1  # placeholder of a token that is not drafted yet


@dataclass(slots=True)
class ModelProgress:
    """What the draft model's KV holds of one sequence.

    ``num_computed``: leading positions with KV of known tokens. ``drafted``: the drafted tokens whose KV follows; it is
    valid for those that were accepted. ``held`` identifies the admission that the blocks belong to. ``strength``:
    accepted tokens of the last draft, plus 1.
    """

    num_computed: int = 0
    drafted: list[int] = field(default_factory=list)
    held: ScheduledSequence | None = None
    strength: int = 1


class ModelDrafts:
    """Drafts of a :class:`DraftModel`. A draft costs device time, so its length is chosen before it is computed."""

    def __init__(self, model: DraftModel, *, tokens_per_block: int, max_num_tokens: int) -> None:
        """``max_num_tokens``: the most tokens of one draft pass; prompts beyond it are computed over several steps."""
        self._model = model
        self._size = tokens_per_block
        self._max_num_tokens = max_num_tokens
        self.kv = DraftKv()

    def outlook(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[Draft]:
        return [
            Draft([_UNKNOWN] * min(count, self._left(one)), _progress(one).strength)
            for one, count in zip(sequences, most, strict=True)
        ]

    def _left(self, sequence: Sequence) -> int:
        """Number of tokens that the draft model's context has room for."""
        room = self._model.room
        return max(0, room - sequence.num_known) if sequence.room <= room else 0

    def draft(self, chosen: SequenceOf[tuple[Sequence, Draft, int]]) -> list[list[int]]:
        shares: list[DraftShare] = []
        budget = self._max_num_tokens
        for sequence, _, length in chosen:
            if not budget:
                break
            share = self._share(sequence, length, budget)
            budget -= len(share.tokens)
            shares.append(share)
        found = self._model.draft(shares)
        for (sequence, _, _), share, tokens in zip(chosen, shares, found, strict=False):
            self._settle(sequence, share, tokens)
        return found + [[] for _ in chosen[len(shares) :]]

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        _progress(sequence).strength = 1 + num_accepted

    def _share(self, sequence: Sequence, length: int, budget: int) -> DraftShare:
        progress, shift = _progress(sequence), self._model.token_shift
        assert sequence.held is not None
        is_first = progress.held is not sequence.held
        if is_first:
            progress.held = sequence.held
            progress.num_computed, progress.drafted = self._num_found(sequence), []
        first = progress.num_computed + shift
        known = sequence.tokens(first, sequence.num_known)
        if progress.drafted:
            right = _num_equal(progress.drafted, known[:-1])
            progress.num_computed, known = progress.num_computed + right, known[right:]
        tokens = known[:budget]
        return DraftShare(
            sequence.slot, is_first, sequence.block_ids, progress.num_computed, tokens,
            length if len(tokens) == len(known) else 0,
        )  # fmt: skip

    def _num_found(self, sequence: Sequence) -> int:
        """Leading positions of a newly admitted sequence whose draft KV another sequence has computed."""
        blocks, names = sequence.block_ids[0], sequence.block_names
        count = 0
        while count < sequence.num_reused and self.kv.is_whole(blocks[count], names[count]):
            count += 1
        # The last position of a block was computed with the token that followed it in the other sequence.
        return max(0, min(count * self._size, sequence.num_known - 1) - self._model.token_shift)

    def _settle(self, sequence: Sequence, share: DraftShare, tokens: list[int]) -> None:
        progress = _progress(sequence)
        end = progress.num_computed = share.start + len(share.tokens)
        progress.drafted = [] if self._model.token_shift else tokens[:-1]
        blocks, names = share.block_ids[0], sequence.block_names
        for index in range(share.start // self._size, -(-(end + len(tokens)) // self._size)):
            if index < len(blocks):
                is_whole = index < min(end // self._size, len(names))
                self.kv.written(blocks[index], names[index] if is_whole else None)


def _progress(sequence: Sequence) -> ModelProgress:
    progress = sequence.drafting
    if progress is None:
        progress = sequence.drafting = ModelProgress()
    assert isinstance(progress, ModelProgress)
    return progress


def _num_equal(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Number of leading items in which two sequences agree."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

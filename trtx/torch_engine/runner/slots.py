"""The device's block tables, updated with the changes since the last step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtx.torch_engine.drafting import DraftShare
from trtx.torch_engine.runner.kernels import KvCache, int32
from trtx.torch_engine.step import ScheduledSequence


class BlockTable:
    """Copies a sequence's new block ids into its slot's row of each table; copied entries are not revisited.

    Tokens and positions are not cached here: a step uploads them (three int32 for each sequence), which costs less than
    comparing the device's state with the scheduler's.
    """

    def __init__(self, cache: KvCache) -> None:
        self._flat = cache.tables.view(-1)
        _, self._rows, self._width = cache.tables.shape
        self._copied = [0] * cache.padding_slot

    def update(self, sequences: Sequence[ScheduledSequence | DraftShare]) -> None:
        """Enqueues one small copy for all rows that grew. Raises ValueError for a sequence past ``max_seq_len``."""
        where: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            slot, count = sequence.slot, len(sequence.block_ids[0])
            copied = 0 if sequence.is_first else self._copied[slot]
            if count > copied:
                if count > self._width:
                    raise ValueError(f"slot {slot} has {count} blocks; max_seq_len allows {self._width}")
                for group, ids in enumerate(sequence.block_ids):
                    begin = (group * self._rows + slot) * self._width
                    where.extend(range(begin + copied, begin + count))
                    blocks.extend(ids[copied:])
            self._copied[slot] = count
        if where:
            both = int32(where + blocks, self._flat.device)
            self._flat[both[: len(where)].long()] = both[len(where) :]


def new_block_tables(
    num_groups: int, *, max_batch_size: int, max_seq_len: int, tokens_per_block: int, device: torch.device
) -> torch.Tensor:
    """Zeroed int32 block tables, ``[num_groups, max_batch_size + 1, blocks of max_seq_len]``.

    A table's last row is the padding slot.
    """
    width = -(-max_seq_len // tokens_per_block)
    return torch.zeros(num_groups, max_batch_size + 1, width, dtype=torch.int32, device=device)

"""The block table on the device, kept up to date by what changed since the last step."""

from __future__ import annotations

import torch

from trtx.torch_engine.batch import ScheduledSequence
from trtx.torch_engine.runner.kernels import KvCache, int32


class BlockTable:
    """Copies a sequence's new block ids into its slot's row; what was copied before is not looked at again.

    Tokens and positions are not kept here: a step uploads them (three int32 a sequence), which costs less than
    comparing what the device has with what the scheduler says.
    """

    def __init__(self, cache: KvCache) -> None:
        self._table = cache.block_table
        self._width = cache.block_table.shape[1]
        self._flat = cache.block_table.view(-1)
        self._copied = [0] * cache.padding_slot

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Enqueues one small copy for all rows that grew. Raises ValueError for a sequence past ``max_seq_len``."""
        where: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            slot, ids = sequence.slot, sequence.block_ids
            copied = 0 if sequence.is_first else self._copied[slot]
            if len(ids) > copied:
                if len(ids) > self._width:
                    raise ValueError(f"slot {slot} has {len(ids)} blocks; max_seq_len allows {self._width}")
                where.extend(range(slot * self._width + copied, slot * self._width + len(ids)))
                blocks.extend(ids[copied:])
            self._copied[slot] = len(ids)
        if where:
            both = int32(where + blocks, self._table.device)
            self._flat[both[: len(where)].long()] = both[len(where) :]


def new_block_table(
    *, max_batch_size: int, max_seq_len: int, tokens_per_block: int, device: torch.device
) -> torch.Tensor:
    """``[max_batch_size + 1, blocks of max_seq_len]`` int32 of zeros; the last row is the padding slot."""
    return torch.zeros(max_batch_size + 1, -(-max_seq_len // tokens_per_block), dtype=torch.int32, device=device)

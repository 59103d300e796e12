"""Contract between the core's host tier (policy) and the runner's copies of blocks (tensors). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockCopy(Protocol):
    """Copies that were started together."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived. Never waits."""

    @property
    def seconds(self) -> float:
        """How long the copies took, once they are done."""


class BlockCopies(Protocol):
    """A pool of blocks in host memory, and copies between it and the device's pool. Block ids index the two pools."""

    num_blocks: int  # in host memory
    block_bytes: int  # of one rank: KV, and what a draft model keeps beside it
    bytes_of_all_ranks: int  # of a block; each rank has a pool for its share, and copies blocks of the same ids

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> BlockCopy:
        """Starts to copy blocks from the device to host memory. No step and no load may be writing these blocks."""

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> BlockCopy:
        """Starts to copy blocks to the device, into blocks that no step uses.

        ``after_stores``: the copy waits for all stores started before it, because one of them reads such a block.
        """

    def hold_steps(self) -> None:
        """Makes every later step begin, on the device, after the stores that were started so far."""

    def wait_for_stores(self) -> None:
        """Returns once the stores that were started so far are done."""

    def close(self) -> None:
        """Waits for all copies and gives the host memory back."""

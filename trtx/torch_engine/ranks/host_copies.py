"""The host tier of several ranks: each has a pool in host memory for its share, and all copy the same block ids.

Rank 0's block pools decide. A copy is done once it is done on every rank, so that no rank reads a block that a copy
still writes. Orders and plans go through one socket, in one order. A copy reads and writes blocks of steps whose
results rank 0 has. These steps are over on the other ranks too: a rank is done with the pool before a step's last sum,
and rank 0 has no result without the rank's part of that sum.

Imports no torch.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trtx.torch_engine.block_copies import BlockCopies, BlockCopy

COPIES = struct.pack("=i", -3)
"""The beginning of a frame with a :data:`CopyOrder`, pickled. A plan begins with its number of sequences."""


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """See :meth:`BlockCopies.store`."""

    copy_id: int
    device_ids: Sequence[int]
    host_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """See :meth:`BlockCopies.load`."""

    copy_id: int
    host_ids: Sequence[int]
    device_ids: Sequence[int]
    after_stores: bool


@dataclass(frozen=True, slots=True)
class HoldSteps:
    """See :meth:`BlockCopies.hold_steps`."""


@dataclass(frozen=True, slots=True)
class WaitForStores:
    """See :meth:`BlockCopies.wait_for_stores`. The rank handles no later frame until then."""


CopyOrder = StoreBlocks | LoadBlocks | HoldSteps | WaitForStores


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A rank's report that all bytes of a copy have arrived."""

    copy_id: int
    seconds: float


class CopyingRank(Protocol):
    """A rank other than rank 0. It executes rank 0's copy orders."""

    def order_copy(self, order: CopyOrder) -> None: ...

    def take_copies(self) -> list[CopyEnded]:
        """Returns the copies that ended since the last call, without blocking."""


@dataclass(slots=True, eq=False)
class RankedCopy:
    """A :class:`~trtx.torch_engine.block_copies.BlockCopy` of every rank."""

    own: BlockCopy
    num_left: int  # other ranks that copy
    take_ended: Callable[[], None]
    others_seconds: float = 0.0  # of the slowest

    def is_done(self) -> bool:
        if self.num_left:
            self.take_ended()
        return not self.num_left and self.own.is_done()

    @property
    def seconds(self) -> float:
        return max(self.own.seconds, self.others_seconds)


class RankedBlockCopies:
    """Rank 0's end: a :class:`~trtx.torch_engine.block_copies.BlockCopies` of every rank."""

    def __init__(
        self, own: BlockCopies, ranks: Sequence[CopyingRank], rank_block_bytes: int, close_others: Callable[[], None]
    ) -> None:
        """``own``: rank 0's. ``ranks``: the others, with as many blocks of ``rank_block_bytes``.

        ``close_others``: closes the ranks' copies.
        """
        self.num_blocks = own.num_blocks
        self.block_bytes = own.block_bytes
        self.bytes_of_all_ranks = own.block_bytes + len(ranks) * rank_block_bytes
        self._own = own
        self._ranks = ranks
        self._close_others = close_others
        self._open: dict[int, RankedCopy] = {}
        self._next_id = 0

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> RankedCopy:
        copy_id = self._new_id()
        self._order(StoreBlocks(copy_id, list(device_ids), list(host_ids)))
        return self._begun(copy_id, self._own.store(device_ids, host_ids))

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> RankedCopy:
        copy_id = self._new_id()
        self._order(LoadBlocks(copy_id, list(host_ids), list(device_ids), after_stores))
        return self._begun(copy_id, self._own.load(host_ids, device_ids, after_stores=after_stores))

    def hold_steps(self) -> None:
        self._order(HoldSteps())
        self._own.hold_steps()

    def wait_for_stores(self) -> None:
        """The other ranks wait before they read from peers; this process waits for its own stores alone."""
        self._order(WaitForStores())
        self._own.wait_for_stores()

    def close(self) -> None:
        self._close_others()
        self._take_ended()
        self._own.close()

    def _order(self, order: CopyOrder) -> None:
        for rank in self._ranks:
            rank.order_copy(order)

    def _new_id(self) -> int:
        copy_id, self._next_id = self._next_id, self._next_id + 1
        return copy_id

    def _begun(self, copy_id: int, own: BlockCopy) -> RankedCopy:
        copy = self._open[copy_id] = RankedCopy(own, len(self._ranks), self._take_ended)
        return copy

    def _take_ended(self) -> None:
        for rank in self._ranks:
            for ended in rank.take_copies():
                copy = self._open[ended.copy_id]
                copy.num_left -= 1
                copy.others_seconds = max(copy.others_seconds, ended.seconds)
                if not copy.num_left:
                    del self._open[ended.copy_id]


@dataclass(slots=True, eq=False)
class FollowedCopies:
    """Another rank's end: does what rank 0 orders, and reports the end of each copy."""

    copies: BlockCopies
    send: Callable[[CopyEnded], None]
    _open: dict[int, BlockCopy] = field(default_factory=dict)

    def do(self, order: CopyOrder) -> None:
        copies = self.copies
        if isinstance(order, StoreBlocks):
            self._open[order.copy_id] = copies.store(order.device_ids, order.host_ids)
        elif isinstance(order, LoadBlocks):
            copy = copies.load(order.host_ids, order.device_ids, after_stores=order.after_stores)
            self._open[order.copy_id] = copy
        elif isinstance(order, HoldSteps):
            copies.hold_steps()
        else:
            copies.wait_for_stores()

    def report(self) -> bool:
        """Reports the copies that have ended. Returns whether others are under way."""
        for copy_id, copy in list(self._open.items()):
            if copy.is_done():
                del self._open[copy_id]
                self.send(CopyEnded(copy_id, copy.seconds))
        return bool(self._open)

    def close(self) -> None:
        """Waits for all copies, reports them, and gives the host memory back."""
        self.copies.close()
        self.report()


def ordered(order: CopyOrder) -> bytes:
    """Returns the frame of an order."""
    return COPIES + pickle.dumps(order)

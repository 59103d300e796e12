"""Tracks KV reads over any transport, from the start of a read to the poll that reports its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import FailedRead, FinishedRead, LayoutMismatch, LeaseExpired, TransportEvents
from trtx.torch_engine.handoff.head_share import CopySpans
from trtx.torch_engine.kv_layout import KvGeometry

BlockIds = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Read:
    """One read: the bytes ``spans`` of block ``remote[i]`` of the exporter go to the local block ``local[i]``."""

    read_id: int
    exported: codec.ExportedKv
    remote: BlockIds
    local: BlockIds
    spans: CopySpans
    num_bytes: int
    begun_s: float


class Transport(Protocol):
    """One way to copy blocks from another process. It reports events through the :class:`Reads` passed to it.

    Every route guarantees two things: nothing writes to a read's local blocks once it is finished or failed, and a read
    is finished only if its lease was in force when the last byte arrived.
    """

    name: str  # name of the field of ExportedKv that holds its offer

    def offer(self) -> codec.DirectOffer | codec.NixlOffer:
        """Describes how others reach this engine's pool."""

    def begin(self, read: Read) -> bool:
        """Starts the copy. Returns False if this route does not reach the exporter. Raises PeerGone."""

    def poll(self) -> None:
        """Settles the copies that have ended, without blocking."""

    def release(self, exported: codec.ExportedKv) -> bool:
        """Tells the exporter that nothing will be read.

        Returns False if this route does not reach the exporter, or no longer does.
        """

    def close(self) -> None:
        """Ends copies in flight and releases the pool."""


class Reads:
    """Validates and numbers reads at their start; collects their ends and the released leases."""

    def __init__(self, geometry: KvGeometry, num_blocks: int, clock: Callable[[], float]) -> None:
        self._geometry = geometry
        self._num_blocks = num_blocks
        self._clock = clock
        self._next_read_id = 0
        self._pending = 0
        self._finished: list[FinishedRead] = []
        self._failed: list[FailedRead] = []
        self._released: deque[int] = deque()  # the thread of a route may append

    @property
    def pending(self) -> int:
        """Reads that have begun and that ``take`` has not reported yet."""
        return self._pending

    def begin(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> Read:
        """Creates a read.

        Raises LayoutMismatch, LeaseExpired, or ValueError for ids that would overwrite another sequence's KV.
        """
        begun_s = time.perf_counter()
        exported = codec.decode(opaque_state)
        codec.check(exported, self._geometry)
        late_s = self._clock() - exported.deadline_s
        if late_s >= 0:
            raise LeaseExpired(
                f"lease {exported.lease_id} of prefill engine {exported.engine} ended {late_s:.1f} s ago; "
                "expected a read within its deadline; compute the prompt locally"
            )
        remote, local = self._block_ids(exported, positions, local_ids)
        size = self._geometry.block_bytes
        spans = CopySpans.whole(size) if exported.part is None else exported.part.spans(size)
        read = Read(self._next_read_id, exported, remote, local, spans, len(local) * spans.length, begun_s)
        self._next_read_id += 1
        return read

    def _block_ids(
        self, exported: codec.ExportedKv, positions: Sequence[int], local_ids: Sequence[int]
    ) -> tuple[BlockIds, BlockIds]:
        if len(positions) != len(local_ids):
            raise ValueError(f"{len(positions)} positions for {len(local_ids)} local blocks; expected as many")
        remote: BlockIds = np.frombuffer(exported.block_ids[: len(exported.block_ids) // 4 * 4], dtype="<i4")
        local = np.array(local_ids, dtype=np.int32)
        if _any_outside(remote, exported.num_blocks):
            raise LayoutMismatch(
                f"opaque_state of prefill engine {exported.engine} names blocks {remote.min()} to {remote.max()} "
                f"of a pool of {exported.num_blocks}; expected ids inside the pool; send it unchanged"
            )
        if _any_outside(local, self._num_blocks):
            raise ValueError(f"local blocks are {local.min()} to {local.max()} of {self._num_blocks}")
        if (
            isinstance(positions, range)
            and positions.step == 1
            and 0 <= positions.start <= positions.stop <= len(remote)
        ):
            return remote[positions.start : positions.stop], local  # the engine's usual case; the rest is general
        at = np.array(positions, dtype=np.int32)
        if _any_outside(at, len(remote)):
            raise ValueError(f"positions {at.min()} to {at.max()} index {len(remote)} exported blocks")
        return remote[at], local

    def admit(self, read: Read) -> None:
        """Counts a read that a route has accepted. Exactly one call of ``finish`` or ``fail`` must end it."""
        self._pending += 1

    def is_late(self, read: Read) -> bool:
        return self._clock() >= read.exported.deadline_s

    def finish(self, read: Read) -> None:
        """Ends a read whose bytes have all arrived.

        Past the deadline the read fails: the exporter may have reused its blocks before this process saw the end of the
        copy.
        """
        if self.is_late(read):
            self.fail(read, "its end was noticed only after its lease's deadline")
        else:
            self._finished.append(FinishedRead(read.read_id, read.num_bytes, time.perf_counter() - read.begun_s))

    def fail(self, read: Read, reason: str) -> None:
        self._failed.append(FailedRead(read.read_id, reason))

    def released(self, lease_id: int) -> None:
        """Records that a reader no longer needs this lease."""
        self._released.append(lease_id)

    def take(self) -> TransportEvents:
        """Returns and clears the events since the last call."""
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        events = TransportEvents(tuple(self._finished), tuple(self._failed), released)
        self._pending -= len(self._finished) + len(self._failed)
        self._finished, self._failed = [], []
        return events


def _any_outside(ids: BlockIds, count: int) -> bool:
    """Whether any id is outside ``[0, count)``, in a single pass: negative ids are large as unsigned numbers."""
    return bool(len(ids)) and bool(ids.view(np.uint32).max() >= count)

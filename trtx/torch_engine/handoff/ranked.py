"""Handoff between engines of any number of ranks: each rank of the reader copies the heads that it holds.

Rank 0 of an engine owns the leases, and reads in parts: one for each pair of a rank of the reader and a rank of the
exporter that have heads in common. A read is finished once all of its parts are, and only then its lease is released.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import (
    FailedRead,
    FinishedRead,
    HandoffError,
    KvTransport,
    LayoutMismatch,
    TransportEvents,
)
from trtx.torch_engine.handoff.head_share import HeadCopy, HeadShares
from trtx.torch_engine.kv_layout import KvGeometry


@dataclass(frozen=True, slots=True)
class PartRead:
    """A part that another rank reads into its own pool."""

    part_id: int
    opaque_state: bytes
    positions: list[int]
    local_ids: list[int]


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The end of a part in another rank. ``reason``: why it failed; "" if it is finished."""

    part_id: int
    num_bytes: int = 0
    reason: str = ""


class RankReader(Protocol):
    """Another rank of this engine, whose pool can be read and which reads parts."""

    @property
    def offer(self) -> codec.DirectOffer:
        """How other engines read its pool."""

    def begin_part(self, part: PartRead) -> None:
        """Starts a part, which exactly one later :meth:`take_parts` reports."""

    def take_parts(self) -> list[PartEnded]:
        """Returns the parts that ended since the last call, without blocking."""


@dataclass(frozen=True, slots=True)
class KvRanks:
    """The KV heads of each rank of an engine and, if it hands off KV, the readers on the ranks besides rank 0."""

    shares: HeadShares
    readers: Sequence[RankReader]


@dataclass(slots=True, eq=False)
class _Open:
    opaque_state: bytes
    begun_s: float
    num_left: int = 0
    num_bytes: int = 0
    reason: str = ""


class RankedTransport:
    """A :class:`~trtx.torch_engine.handoff.base.KvTransport` of an engine whose rank 0 is in this process.

    Reads between engines of one rank each go to ``own`` as they are.
    """

    def __init__(self, own: KvTransport, geometry: KvGeometry, ranks: KvRanks | None = None) -> None:
        """``own``: the transport of rank 0's pool, whose layout is ``geometry``. ``ranks``: None for a single rank."""
        ranks = ranks or KvRanks(HeadShares(geometry.groups[0].num_kv_heads), ())
        self.name = own.name
        self._own = own
        self._geometry = geometry.with_heads(ranks.shares.heads)
        self._shares = ranks.shares
        self._readers = ranks.readers
        self._open: dict[int, _Open] = {}
        self._next_id = self._next_part_id = 0
        self._of_own: dict[int, int] = {}  # read id of ``own`` -> read id
        self._of_parts: dict[int, int] = {}  # part id -> read id
        self._plain: set[int] = set()  # reads that are not in parts

    @property
    def pending_reads(self) -> int:
        return len(self._open) + len(self._plain)

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        state = self._own.export(lease_id, block_ids, num_tokens, deadline_s)
        if not self._readers:
            return state
        peers = tuple(reader.offer for reader in self._readers)
        return codec.encode(replace(codec.decode(state), peers=peers, kv_heads=self._shares.heads))

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        exported = codec.decode(opaque_state)
        if not exported.peers and not self._readers:
            read_id = self._new_id(self._own.begin_read(opaque_state, positions, local_ids))
            self._plain.add(read_id)
            return read_id
        theirs = exported.kv_heads or exported.geometry.groups[0].num_kv_heads
        codec.check_layouts(exported, exported.geometry.with_heads(theirs), self._geometry)
        if exported.direct is None:
            raise LayoutMismatch(
                f"prefill engine {exported.engine} does not share its memory with other processes of this host; a "
                "handoff from or to several GPUs of a worker needs that"
            )
        return self._begin_parts(exported, HeadShares(theirs, 1 + len(exported.peers)), positions, local_ids)

    def _begin_parts(
        self, exported: codec.ExportedKv, sources: HeadShares, positions: Sequence[int], local_ids: Sequence[int]
    ) -> int:
        """Starts the parts, those of rank 0 first. Raises only if the first one can't begin."""
        opened = _Open(codec.encode(exported), time.perf_counter())
        read_id = -1
        for rank in range(1 + len(self._readers)):
            for source, heads in sources.sources(self._shares.of(rank)):
                state = codec.encode(_part(exported, source, heads))
                if rank:
                    self._begin_elsewhere(rank, state, read_id, positions, local_ids)
                else:
                    try:
                        own = self._own.begin_read(state, positions, local_ids)
                    except HandoffError as error:
                        if read_id < 0:
                            raise
                        opened.reason = str(error).partition("; ")[0]  # the cause, without the advice
                        break
                    read_id = self._new_id(own) if read_id < 0 else self._add_own(own, read_id)
                opened.num_left += 1
            if opened.reason:
                break
        self._open[read_id] = opened
        return read_id

    def _begin_elsewhere(
        self, rank: int, state: bytes, read_id: int, positions: Sequence[int], local_ids: Sequence[int]
    ) -> None:
        part_id, self._next_part_id = self._next_part_id, self._next_part_id + 1
        self._of_parts[part_id] = read_id
        self._readers[rank - 1].begin_part(PartRead(part_id, state, list(positions), list(local_ids)))

    def _new_id(self, own: int) -> int:
        read_id, self._next_id = self._next_id, self._next_id + 1
        return self._add_own(own, read_id)

    def _add_own(self, own: int, read_id: int) -> int:
        self._of_own[own] = read_id
        return read_id

    def poll(self) -> TransportEvents:
        events = self._own.poll()
        finished: list[FinishedRead] = []
        failed: list[FailedRead] = []
        for read in events.finished:
            read_id = self._of_own.pop(read.read_id)
            if read_id in self._plain:
                self._plain.remove(read_id)
                finished.append(FinishedRead(read_id, read.num_bytes, read.seconds, read.is_corrupted))
            else:
                self._end_part(read_id, read.num_bytes, "")
        for failure in events.failed:
            read_id = self._of_own.pop(failure.read_id)
            if read_id in self._plain:
                self._plain.remove(read_id)
                failed.append(FailedRead(read_id, failure.reason))
            else:
                self._end_part(read_id, 0, failure.reason)
        for reader in self._readers:
            for ended in reader.take_parts():
                self._end_part(self._of_parts.pop(ended.part_id), ended.num_bytes, ended.reason)
        for read_id, opened in list(self._open.items()):
            if opened.num_left:
                continue
            del self._open[read_id]
            if opened.reason:
                failed.append(FailedRead(read_id, opened.reason))
            else:
                self._own.release(opened.opaque_state)
                finished.append(FinishedRead(read_id, opened.num_bytes, time.perf_counter() - opened.begun_s))
        return TransportEvents(tuple(finished), tuple(failed), events.released)

    def _end_part(self, read_id: int, num_bytes: int, reason: str) -> None:
        opened = self._open[read_id]
        opened.num_left -= 1
        opened.num_bytes += num_bytes
        opened.reason = opened.reason or reason

    def release(self, opaque_state: bytes) -> None:
        self._own.release(opaque_state)

    def close(self) -> None:
        self._own.close()


def _part(exported: codec.ExportedKv, source: int, heads: HeadCopy) -> codec.ExportedKv:
    """Returns the description of the blocks that the exporter's rank ``source`` holds."""
    assert exported.direct is not None
    return replace(
        exported, direct=(exported.direct, *exported.peers)[source], nixl=None, peers=(), kv_heads=0, part=heads,
        geometry=exported.geometry.with_heads(heads.source_heads),
    )  # fmt: skip

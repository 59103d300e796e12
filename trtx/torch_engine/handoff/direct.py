"""The direct transport between processes on one host: copies KV blocks straight from the other process's memory.

Between GPUs, a read is one kernel over NVLink from the exporter's pool into the local pool. The exporter takes no part
in it, so a frozen exporter can't delay a copy; and only this process writes to the local pool, so a read that has ended
has no writes outstanding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import PeerGone
from trtx.torch_engine.handoff.memory import CopyFailed, PoolMemory
from trtx.torch_engine.handoff.neighbours import Neighbour, Neighbours
from trtx.torch_engine.handoff.reads import Read, Reads


@dataclass(slots=True, eq=False)
class _Copy:
    read: Read
    source: Neighbour | None  # None: the local pool
    ticket: Any  # from PoolMemory; None if there was nothing to copy


class DirectRoute:
    """A :class:`~trtx.torch_engine.handoff.reads.Transport` to the same user's engines on the same host.

    A read fails if its exporter is gone when the copy ends, because the memory may have been reused during the copy.
    """

    name = "direct"

    def __init__(self, memory: PoolMemory, neighbours: Neighbours, reads: Reads) -> None:
        self._memory = memory
        self._neighbours = neighbours
        self._reads = reads
        self._copies: list[_Copy] = []  # in start order, which is also completion order

    def offer(self) -> codec.DirectOffer:
        return self._neighbours.offer

    def begin(self, read: Read) -> bool:
        offer = read.exported.direct
        if offer is None or not self._leads_to(offer):
            return False
        source = None
        if offer.address != self._neighbours.offer.address:
            source = self._neighbours.find(offer)
            if source is None:
                return False
        copy = _Copy(read, source, None)
        try:
            if source is not None and source.is_gone:
                raise CopyFailed("it closed its connection")
            if len(read.local):
                pool = self._memory.own if source is None else source.pool
                copy.ticket = self._memory.start(pool, read.remote, read.local, read.spans)
        except CopyFailed as error:
            assert source is not None
            self._neighbours.leave(source)
            raise PeerGone(
                f"prefill engine {read.exported.engine} that holds lease {read.exported.lease_id} is gone ({error}); "
                "compute the prompt locally"
            ) from error
        self._copies.append(copy)
        return True

    def _leads_to(self, offer: codec.DirectOffer) -> bool:
        ours = self._neighbours.offer
        return (offer.host, offer.memory) == (ours.host, ours.memory)

    def poll(self) -> None:
        while self._copies and self._is_done(self._copies[0]):
            self._settle(self._copies.pop(0))

    def _is_done(self, copy: _Copy) -> bool:
        return not len(copy.read.local) or self._memory.is_done(copy.ticket)

    def _settle(self, copy: _Copy) -> None:
        read = copy.read
        if read.exported.part is not None:  # the engine releases the lease once all parts have arrived
            is_there = copy.source is None or self._neighbours.is_alive(copy.source)
        else:
            is_there = self._reads.is_late(read) or self.release(read.exported)
        if copy.source is not None:
            self._neighbours.leave(copy.source)
        if is_there:
            self._reads.finish(read)
        else:
            self._reads.fail(read, "the prefill engine is gone (it closed its connection)")

    def release(self, exported: codec.ExportedKv) -> bool:
        offer = exported.direct
        if offer is None or not self._leads_to(offer):
            return False
        if offer.address == self._neighbours.offer.address:
            self._reads.released(exported.lease_id)
            return True
        return self._neighbours.tell_released(offer.address, exported.lease_id)

    def close(self) -> None:
        """Waits for copies in flight, which takes a few milliseconds."""
        self._memory.close()
        for copy in self._copies:
            if copy.source is not None:
                self._neighbours.leave(copy.source)
            self._reads.fail(copy.read, "the transport was closed")
        self._copies = []
        self._neighbours.close()

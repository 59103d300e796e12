"""The transport that the engine core uses: one pool, and several routes for blocks into it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import LayoutMismatch, PeerGone, TransportEvents
from trtx.torch_engine.handoff.reads import Reads, Transport

if TYPE_CHECKING:
    from trtx.torch_engine.kv_layout import KvGeometry

log = logging.getLogger(__name__)


class RoutedTransport:
    """A :class:`~trtx.torch_engine.handoff.base.KvTransport` over several routes.

    A read uses the first route that reaches the exporter.
    """

    def __init__(
        self, engine: str, geometry: KvGeometry, num_blocks: int, reads: Reads, routes: Sequence[Transport]
    ) -> None:
        self.name = " or ".join(route.name for route in routes)
        self._engine = engine
        self._geometry = geometry
        self._num_blocks = num_blocks
        self._reads = reads
        self._routes = routes
        self._closed = False

    @property
    def pending_reads(self) -> int:
        return self._reads.pending

    def offers(self) -> dict[str, codec.DirectOffer | codec.NixlOffer]:
        """Returns how others reach the pool, by the names of the routes."""
        return {route.name: route.offer() for route in self._routes}

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        offers: dict[str, Any] = self.offers()
        return codec.encode(
            codec.ExportedKv(
                engine=self._engine,
                num_blocks=self._num_blocks,
                geometry=self._geometry,
                lease_id=lease_id,
                block_ids=np.array(block_ids, dtype="<i4").tobytes(),
                num_tokens=num_tokens,
                deadline_s=deadline_s,
                **offers,
            )
        )

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        read = self._reads.begin(opaque_state, positions, local_ids)
        for route in self._routes:
            if route.begin(read):
                self._reads.admit(read)
                return read.read_id
        exported = read.exported
        if any(getattr(exported, route.name) is not None for route in self._routes):
            raise PeerGone(
                f"prefill engine {exported.engine} that holds lease {exported.lease_id} can't be reached; "
                "compute the prompt locally"
            )
        raise LayoutMismatch(
            f"prefill engine {exported.engine} offers no KV transport that this decode engine supports; "
            f"expected {self.name}; run the same trtx version on both"
        )

    def poll(self) -> TransportEvents:
        for route in self._routes:
            route.poll()
        return self._reads.take()

    def release(self, opaque_state: bytes) -> None:
        try:
            exported = codec.decode(opaque_state)
        except LayoutMismatch as error:
            log.warning("a lease is left to its deadline: %s", error)
            return
        for route in self._routes:
            if route.release(exported):
                return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for route in self._routes:
            route.close()

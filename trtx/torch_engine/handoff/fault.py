"""The transport with a fault in it, for tests alone: see :mod:`trtx.torch_engine.kv_fault`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtx.errors import UsageError
from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import KvTransport, TransportEvents
from trtx.torch_engine.kv_fault import VARIABLE, KvFault

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.kv_layout import KvGeometry

log = logging.getLogger(__name__)

_LAYER = 2  # of a pool: [block, kv_head, layer, 2, token, dim]


class FaultyTransport:
    """A :class:`~trtx.torch_engine.handoff.base.KvTransport` that corrupts what some reads brought.

    The block that is replaced is the first that was read: all of its tokens count for all that follow, as those of a
    prompt's last block may not. Two blocks of one prompt are never swapped: attention is a sum over keys that carry
    their positions in them, so that would change nothing.
    """

    def __init__(self, transport: KvTransport, pool: torch.Tensor, geometry: KvGeometry, fault: KvFault) -> None:
        if len(geometry.groups) > 1:
            raise UsageError(f"{VARIABLE} is {fault}; expected a model all of whose layers see the same positions")
        layers = pool.shape[_LAYER]
        if fault.layer >= layers:
            raise UsageError(f"{VARIABLE} is {fault}; expected a layer below the model's {layers}")
        self.name = f"{transport.name}, WITH A FAULT"
        self._transport = transport
        self._pool = pool
        self._fault = fault
        self._under_way: dict[int, tuple[int, int]] = {}  # read -> its first block here, tokens of the prompt
        self._finished = 0
        self._last: torch.Tensor | None = None  # the layer of the block that an earlier read brought
        log.warning(
            "%s=%s: KV IS CORRUPTED ON PURPOSE in this engine; no answer of it is to be trusted", VARIABLE, fault
        )

    @property
    def pending_reads(self) -> int:
        return self._transport.pending_reads

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        return self._transport.export(lease_id, block_ids, num_tokens, deadline_s)

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        read_id = self._transport.begin_read(opaque_state, positions, local_ids)
        self._under_way[read_id] = local_ids[0], codec.decode(opaque_state).num_tokens
        return read_id

    def poll(self) -> TransportEvents:
        events = self._transport.poll()
        for failed in events.failed:
            self._under_way.pop(failed.read_id)
        finished = tuple(
            replace(read, is_corrupted=self._corrupt(*self._under_way.pop(read.read_id))) for read in events.finished
        )
        return replace(events, finished=finished)

    def _corrupt(self, block: int, num_tokens: int) -> bool:
        """One read has ended. Every so often, its first block gets what an earlier one brought, where that differs:
        whether it did now."""
        import torch

        is_corrupted = False

        self._finished += 1
        own = self._pool[block].select(_LAYER - 1, self._fault.layer)
        brought = own.clone()
        if self._finished % self._fault.every == 0:
            if self._last is None or torch.equal(self._last, brought):
                self._finished -= 1  # it would change nothing: the next one, then
            else:
                with torch.inference_mode():  # as the pool was made
                    own.copy_(self._last)
                is_corrupted = True
                log.warning(
                    "%s: layer %d of block %d, of a prompt of %d tokens, holds another request's KV now",
                    VARIABLE, self._fault.layer, block, num_tokens,
                )  # fmt: skip
        self._last = brought
        return is_corrupted

    def release(self, opaque_state: bytes) -> None:
        self._transport.release(opaque_state)

    def close(self) -> None:
        self._transport.close()

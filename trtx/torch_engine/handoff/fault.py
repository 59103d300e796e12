"""A KV transport with an injected fault, for tests only: see :mod:`trtx.torch_engine.kv_fault`."""

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

_LAYER = 2  # dimension of the pool: [block, kv_head, layer, 2, token, dim]


class FaultyTransport:
    """A :class:`~trtx.torch_engine.handoff.base.KvTransport` that corrupts the KV of some reads.

    It replaces the first block that was read: all later tokens attend to all of its tokens, which may not hold for the
    last block of a prompt. It never swaps two blocks of the same prompt, which would change nothing: attention is a sum
    over keys, and keys carry their positions.
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
        self._under_way: dict[int, tuple[int, int]] = {}  # read id -> (its first local block, tokens of the prompt)
        self._finished = 0
        self._last: torch.Tensor | None = None  # the faulty layer of the first block of an earlier read
        log.warning("%s=%s: KV IS CORRUPTED ON PURPOSE in this engine; do not trust its answers", VARIABLE, fault)

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
        """Handles the end of one read.

        Every n-th read's first block gets an earlier read's content, unless both are equal.

        Returns whether this read was corrupted.
        """
        import torch

        is_corrupted = False

        self._finished += 1
        own = self._pool[block].select(_LAYER - 1, self._fault.layer)
        brought = own.clone()
        if self._finished % self._fault.every == 0:
            if self._last is None or torch.equal(self._last, brought):
                self._finished -= 1  # the contents are equal: corrupt the next read instead
            else:
                with torch.inference_mode():  # the pool was created in inference mode
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

"""KV handoff: moves the KV blocks that a prefill engine computed into the pool of a decode engine.

It owns the transport interface with its two transports (``direct``, from the memory of a process on the same host, and
``nixl``), the ``opaque_state`` that travels between the two engines, and the lease table. The engine core decides which
blocks are read, frees blocks and recomputes prompts, based on the events that ``poll`` reports. Callers enter through
:func:`create_transport`.

Two invariants always hold. A local block belongs to the transport from ``begin_read`` until its read is reported. Data
moves only if the layouts of both sides are equal, field by field.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trtx.errors import UsageError
from trtx.ipc.leases import HandoffLease, LeaseTable
from trtx.torch_engine.handoff.base import (
    FailedRead,
    FinishedRead,
    HandoffError,
    KvTransport,
    LayoutMismatch,
    LeaseExpired,
    PeerGone,
    TransportEvents,
)
from trtx.torch_engine.handoff.codec import DirectOffer, layout_of
from trtx.torch_engine.handoff.reads import Reads, Transport
from trtx.torch_engine.handoff.transport import RoutedTransport

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.kv_layout import KvGeometry

__all__ = [
    "ROUTES",
    "FailedRead",
    "FinishedRead",
    "HandoffError",
    "HandoffLease",
    "KvTransport",
    "LayoutMismatch",
    "LeaseExpired",
    "LeaseTable",
    "PeerGone",
    "TransportEvents",
    "create_transport",
    "direct_offer",
]

log = logging.getLogger(__name__)

ROUTES = ("direct", "nixl")


def create_transport(
    pool: torch.Tensor,
    geometry: KvGeometry,
    *,
    routes: Sequence[str] = ROUTES,
    group: str | None = None,
    clock: Callable[[], float] = time.time,
) -> KvTransport:
    """Registers ``pool`` with the transports. Slow (importing NIXL takes 3 s): call it once, at start.

    ``pool``: contiguous ``[num_blocks, *geometry.block_shape]`` of ``geometry.dtype``, on a CPU or a GPU; it must
    outlive the transport. ``routes``: transports by preference; a read uses the first that reaches the prefill engine.
    ``group``: engines of this host with the same group open each other's pools before the first read. ``clock``: for
    lease deadlines, common to both engines, in Unix seconds.
    """
    expected = geometry.block_shape
    if tuple(pool.shape[1:]) != expected or str(pool.dtype) != f"torch.{geometry.dtype}" or not pool.is_contiguous():
        raise ValueError(
            f"pool is {tuple(pool.shape)} of {pool.dtype}, contiguous: {pool.is_contiguous()}; "
            f"expected a contiguous (num_blocks, {', '.join(map(str, expected))}) of torch.{geometry.dtype}"
        )
    if pool.is_cuda:
        import torch

        torch.cuda.current_stream(pool.device).synchronize()  # copies wait for no stream of the caller
    reads = Reads(geometry, pool.shape[0], clock)
    opened: list[Transport] = []
    for name in routes:
        if name == "direct":
            opened += _direct(pool, geometry, group, reads)
        elif name == "nixl":
            from trtx.torch_engine.handoff.nixl import NixlRoute

            opened.append(NixlRoute(pool, geometry, reads))
        else:
            raise UsageError(f"KV route {name!r} is not known; expected {' or '.join(ROUTES)}")
    return RoutedTransport(f"trtx-{uuid.uuid4().hex}", geometry, pool.shape[0], reads, opened)


def direct_offer(transport: KvTransport) -> DirectOffer:
    """Returns how other processes of this host read the pool of a transport.

    Raises UsageError if the pool can't be shared, which a handoff from or to an engine of several ranks needs.
    """
    assert isinstance(transport, RoutedTransport)
    for offer in transport.offers().values():
        if isinstance(offer, DirectOffer):
            return offer
    raise UsageError(
        "the KV pool can't be shared with other processes of this host, and workers of several GPUs hand off KV only "
        "that way; use --tp 1, or --mode agg"
    )


def _direct(pool: torch.Tensor, geometry: KvGeometry, group: str | None, reads: Reads) -> list[Transport]:
    """Returns the direct transport, or [] if the pool can't be shared; blocks between local GPUs then go over NIXL."""
    from trtx.torch_engine.handoff.direct import DirectRoute
    from trtx.torch_engine.handoff.memory import MemoryUnreachable, PoolMemory, ProcessMemory
    from trtx.torch_engine.handoff.neighbours import Neighbours

    memory: PoolMemory
    try:
        if pool.is_cuda:
            from trtx.torch_engine.handoff.cuda_memory import CudaMemory

            memory = CudaMemory(pool, geometry.block_bytes)
        else:
            memory = ProcessMemory(pool, geometry.block_bytes)
        return [DirectRoute(memory, Neighbours(memory, layout_of(geometry), group, reads.released), reads)]
    except (MemoryUnreachable, OSError) as error:
        log.warning("the KV pool is not offered to other processes of this host directly: %s", error)
        return []

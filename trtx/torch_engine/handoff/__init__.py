"""KV handoff: how the KV blocks that a prefill engine computed reach the pool of a decode engine.

Owns the transport interface and the two routes behind it (straight from the memory of a process of the same host, and
NIXL), the ``opaque_state`` that travels between the two engines, and the table of leases. It does not decide who reads
what, nor free blocks, nor recompute: the engine core does, with the events that ``poll`` reports. Enter through
:func:`create_transport`; a local block belongs to the transport from ``begin_read`` until its read is reported, and the
layouts of both sides are equal, field by field, or nothing moves.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trtx.errors import UsageError
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
from trtx.torch_engine.handoff.codec import layout_of
from trtx.torch_engine.handoff.leases import Lease, LeaseTable
from trtx.torch_engine.handoff.reads import Reads, Route
from trtx.torch_engine.handoff.transport import RoutedTransport

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.kv_layout import KvGeometry

__all__ = [
    "ROUTES",
    "FailedRead",
    "FinishedRead",
    "HandoffError",
    "KvTransport",
    "LayoutMismatch",
    "Lease",
    "LeaseExpired",
    "LeaseTable",
    "PeerGone",
    "TransportEvents",
    "create_transport",
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
    """Registers ``pool`` with the ways for blocks to travel. Slow (NIXL takes 3 s to import): once, at start.

    ``pool``: contiguous, ``[num_blocks, *geometry.block_shape]`` of ``geometry.dtype``, on a CPU or a GPU; it must
    outlive the transport. ``routes``: the first that leads to a prefill
    engine is taken. ``group``: engines of this host with the same one open each other's pools before they read.
    ``clock`` is what deadlines are read on and must be common to both engines: Unix seconds.
    """
    expected = geometry.block_shape
    if tuple(pool.shape[1:]) != expected or str(pool.dtype) != f"torch.{geometry.dtype}" or not pool.is_contiguous():
        raise ValueError(
            f"pool is {tuple(pool.shape)} of {pool.dtype}, contiguous: {pool.is_contiguous()}; "
            f"expected a contiguous (num_blocks, {', '.join(map(str, expected))}) of torch.{geometry.dtype}"
        )
    if pool.is_cuda:
        import torch

        torch.cuda.current_stream(pool.device).synchronize()  # what fills it; copies wait for no stream of the caller's
    reads = Reads(geometry, pool.shape[0], clock)
    opened: list[Route] = []
    for name in routes:
        if name == "direct":
            opened += _direct(pool, geometry, group, reads)
        elif name == "nixl":
            from trtx.torch_engine.handoff.nixl import NixlRoute

            opened.append(NixlRoute(pool, geometry, reads))
        else:
            raise UsageError(f"KV route {name!r} is not known; expected {' or '.join(ROUTES)}")
    return RoutedTransport(f"trtx-{uuid.uuid4().hex}", geometry, pool.shape[0], reads, opened)


def _direct(pool: torch.Tensor, geometry: KvGeometry, group: str | None, reads: Reads) -> list[Route]:
    """None where the pool cannot be shared: then what is between GPUs of one host goes as all else does."""
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

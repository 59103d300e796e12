"""KV handoff: how the KV blocks that a prefill engine computed reach the pool of a decode engine.

Owns the transport interface and its NIXL implementation, the ``opaque_state`` that travels between the two engines,
and the table of leases. It does not decide who reads what, nor free blocks, nor recompute: the engine core does, with
the events that ``poll`` reports. Enter through :func:`create_transport`; a local block belongs to the transport from
``begin_read`` until its read is reported, and the layouts of both sides are equal, field by field, or nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from trtx.torch_engine.handoff.leases import Lease, LeaseTable

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.batch import KvGeometry

__all__ = [
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


def create_transport(
    pool: torch.Tensor, geometry: KvGeometry, name: str = "nixl", *, clock: Callable[[], float] = time.time
) -> KvTransport:
    """Registers ``pool`` with the transport called ``name``. Slow (NIXL takes 3 s to import): once, at start.

    ``pool``: contiguous, ``[num_blocks, num_layers, 2, tokens_per_block, num_kv_heads, head_dim]`` of
    ``geometry.dtype``, on a CPU or a GPU; it must outlive the transport. ``clock`` is what deadlines are read on and
    must be common to both engines: Unix seconds.
    """
    if name != "nixl":
        raise UsageError(f"KV transport {name!r} is not known; expected nixl")
    from trtx.torch_engine.handoff.nixl import NixlTransport

    return NixlTransport(pool, geometry, clock=clock)

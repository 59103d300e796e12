"""The interface of a KV transport: the engine core's calls, their results and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trtx.errors import TrtxError


class HandoffError(TrtxError):
    """Base class of handoff errors. A client's request causes none of them."""


class LayoutMismatch(HandoffError):
    """The two engines disagree on the layout of a KV block.

    This is a configuration error, which recomputing prompts would hide.
    """

    exit_code = 2


class PeerGone(HandoffError):
    """The prefill engine, or the lease on its blocks, no longer exists: compute the prompt locally."""


class LeaseExpired(PeerGone):
    """The lease's deadline has passed: the prefill engine may reuse its blocks."""


@dataclass(frozen=True, slots=True)
class FinishedRead:
    """A read that copied ``num_bytes`` into the local blocks, ``seconds`` after ``begin_read``."""

    read_id: int
    num_bytes: int
    seconds: float
    is_corrupted: bool = False  # on purpose, by an injected fault


@dataclass(frozen=True, slots=True)
class FailedRead:
    """A read that failed.

    No more writes to the local blocks follow; their content is undefined: compute the prompt locally.
    """

    read_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class TransportEvents:
    """Events since the last ``poll``. False if there are none."""

    finished: tuple[FinishedRead, ...] = ()
    failed: tuple[FailedRead, ...] = ()
    released: tuple[int, ...] = ()  # lease ids of this engine's exports that their readers no longer need

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.released)


class KvTransport(Protocol):
    """Moves KV blocks from the pool of one engine process straight into the pool of another.

    A single thread (the engine's loop) calls it. No call waits for a peer. The core should wait as follows. Between
    steps, call ``poll``. With nothing to compute and ``pending_reads > 0``, poll without a pause for the first
    milliseconds of a read, then every 0.2 ms. With nothing to compute and leases outstanding, poll every 10 ms, which
    bounds the delay until their blocks return. Otherwise do not poll.
    """

    name: str

    @property
    def pending_reads(self) -> int:
        """Number of reads that ``poll`` has reported neither as finished nor as failed."""

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        """Describes leased blocks to a reader. Returns the ``opaque_state`` that travels to the decode engine.

        ``block_ids``: for each KV cache group in turn, in token order, the blocks that a query after ``num_tokens``
        tokens reads. Their KV is complete and visible (see ``LaunchedStep.results``). ``deadline_s`` is absolute, on
        the transport's clock (Unix seconds by default). Keep the blocks until ``poll`` reports the lease as released,
        or until a :class:`LeaseTable` expires it.
        """

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        """Starts copying blocks. Returns a read id, which exactly one later ``poll`` reports.

        The block at ``positions[i]`` of the exported list goes to the local block ``local_ids[i]``. Until the report,
        the local blocks belong to the transport, and no step in flight may write to them: their previous holder kept
        them until its last step was done. A finished read releases the peer's lease; a failed one does not. Raises
        :class:`LayoutMismatch` with both layouts, :class:`PeerGone` if the peer is known to have died,
        :class:`LeaseExpired` if the deadline has passed.
        """

    def poll(self) -> TransportEvents:
        """Returns the reads that finished or failed and the leases released since the last call, without blocking."""

    def release(self, opaque_state: bytes) -> None:
        """Tells the prefill side that nothing (more) will be read, so that it may free the blocks.

        Best effort and idempotent: it never raises :class:`PeerGone`, because a dead peer needs no message.
        """

    def close(self) -> None:
        """Cancels pending reads and releases the pool. Idempotent."""

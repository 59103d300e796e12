"""The interface of a KV transport: what the engine core calls, what it gets back, what can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trtx.errors import TrtxError


class HandoffError(TrtxError):
    """Base of what a handoff can fail with. None of them is the fault of the client's request."""


class LayoutMismatch(HandoffError):
    """The two engines disagree on what a KV block looks like: a configuration error that recomputation would hide."""

    exit_code = 2


class PeerGone(HandoffError):
    """The prefill engine, or the lease on its blocks, is no longer there: compute the prompt locally."""


class LeaseExpired(PeerGone):
    """The lease's deadline has passed: the prefill engine may be reusing its blocks."""


@dataclass(frozen=True, slots=True)
class FinishedRead:
    """``num_bytes`` arrived in the local blocks, ``seconds`` after ``begin_read`` was called."""

    read_id: int
    num_bytes: int
    seconds: float
    is_corrupted: bool = False  # on purpose, by a planted fault


@dataclass(frozen=True, slots=True)
class FailedRead:
    """Nothing writes to the local blocks any more, and what they hold is undefined: compute it locally."""

    read_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class TransportEvents:
    """What happened since the last ``poll``. False when nothing did."""

    finished: tuple[FinishedRead, ...] = ()
    failed: tuple[FailedRead, ...] = ()
    released: tuple[int, ...] = ()  # lease ids of this engine's exports that their reader needs no more

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.released)


class KvTransport(Protocol):
    """Moves KV blocks from the pool of one engine process straight into the pool of another.

    One thread (the engine's loop) calls it. No call waits for a peer. How a core should wait: between steps call
    ``poll``; with nothing to compute and ``pending_reads > 0`` poll without a pause for the first milliseconds of a
    read, then every 0.2 ms; with nothing to compute and leases outstanding poll every 10 ms, which is how late their
    blocks come back; otherwise not at all.
    """

    name: str

    @property
    def pending_reads(self) -> int:
        """Reads begun here that ``poll`` has reported neither as finished nor as failed."""

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        """Describes leased blocks to a reader: the ``opaque_state`` that travels to decode.

        ``block_ids``: of each group in turn, in token order, what a query behind ``num_tokens`` tokens sees of them;
        their KV is complete and visible (see ``LaunchedStep.results``). ``deadline_s`` is absolute, on the transport's
        clock (Unix seconds by default). Keep the blocks until ``poll`` reports the lease as released, or until a
        :class:`LeaseTable` expires it.
        """

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        """Starts copying blocks and returns a read id, which exactly one later ``poll`` reports.

        The block at ``positions[i]`` of the exported list goes to the local block ``local_ids[i]``. The local blocks
        belong to the transport until then, and no step under way writes to them: whoever had them before kept them
        until its last step was done. A finished read releases the peer's lease; a failed one does not. Raises
        :class:`LayoutMismatch` with both sides named, :class:`PeerGone` when the peer's death is already known,
        :class:`LeaseExpired` when the deadline has passed.
        """

    def poll(self) -> TransportEvents:
        """What finished, failed and was released since the last call, without blocking."""

    def release(self, opaque_state: bytes) -> None:
        """Tells the prefill side that nothing (more) will be read, so that it may free the blocks.

        Best effort and idempotent: a peer that is gone needs no telling, so this never raises :class:`PeerGone`.
        """

    def close(self) -> None:
        """Cancels what is pending and lets go of the pool. Idempotent."""

"""The engine's side of KV handoff: leases on blocks for readers, and reads of a peer's blocks into the local pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from trtx.torch_engine.core.media import EmbeddingShortage
from trtx.torch_engine.core.scheduler import Scheduler
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.handoff import KvTransport, LayoutMismatch, LeaseTable, PeerGone
from trtx.torch_engine.messages import HandoffStats, KvTransfer

READ_POLL_S = 0.0002
LEASE_POLL_S = 0.01
"""Poll interval of an idle engine's transport, with reads pending and with leases out: see ``KvTransport``."""

READ_SPIN_S = 0.002
"""How long an idle engine busy-polls after a read has begun. 1,000 tokens of an 8B model arrive in 0.4 ms, and a sleep
of 0.2 ms takes 0.26 ms.
"""


class Handoffs:
    """Owns the transport, the lease table and the reads in flight. Every export ends in a release or an expiry."""

    def __init__(
        self,
        transport: KvTransport,
        scheduler: Scheduler,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.stats = HandoffStats()
        self._transport = transport
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._clock = clock
        self._leases = LeaseTable()
        self._leased: dict[int, tuple[int, ...]] = {}
        self._reads: dict[int, Sequence] = {}
        self._next_lease_id = 0
        self._begun_s = 0.0  # of the latest read; time.perf_counter
        self._short: list[tuple[Sequence, EmbeddingShortage]] = []

    @property
    def leased(self) -> list[tuple[int, ...]]:
        """Block lists that leases hold references to."""
        return list(self._leased.values())

    @property
    def wait_s(self) -> float | None:
        """Seconds that an idle engine may sleep; None: no limit."""
        if self._reads:
            return 0.0 if time.perf_counter() - self._begun_s < READ_SPIN_S else READ_POLL_S
        return LEASE_POLL_S if self._leases else None

    @property
    def unfinished(self) -> str:
        """Describes leases and reads that have not ended; empty if there are none."""
        parts = [(len(self._leases), "unread handoff"), (len(self._reads), "handoff in transfer")]
        return " and ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in parts if count)

    # --- prefill side ---

    def lease(self, sequence: Sequence) -> bytes:
        """Ends a prefilled sequence, leases the prompt blocks that a decode engine reads, and returns the opaque_state.

        The step that computed the end of the prompt must be committed, so that a peer sees all of its KV: see
        ``LaunchedStep.results``.
        """
        num_tokens = len(sequence.prompt_token_ids)
        block_ids = self._scheduler.finish(sequence, keep_tokens=num_tokens)
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        deadline_s = self._clock() + self._timeout_s
        self._leases.grant(lease_id, block_ids, deadline_s)
        self._leased[lease_id] = tuple(block_ids)
        self.stats.leases = len(self._leases)
        return self._transport.export(lease_id, block_ids, num_tokens, deadline_s)

    def _end_lease(self, lease_id: int) -> None:
        self._scheduler.pool.release(self._leased.pop(lease_id))
        self.stats.leases = len(self._leases)

    # --- decode side ---

    def begin_read(self, sequence: Sequence) -> str | None:
        """Starts to read the blocks that the local prefix cache lacks.

        Returns why the request must be refused, or None.
        """
        opaque_state = _opaque_state(sequence)
        num_tokens = len(sequence.prompt_token_ids)
        missing, local = self._scheduler.groups.missing(sequence.block_ids, sequence.num_reused, num_tokens)
        if not local:
            self._transport.release(opaque_state)
            sequence.has_read, sequence.transfer = True, KvTransfer()
            sequence.stages.read = time.perf_counter()
            self._scheduler.end_read(sequence, num_tokens)
            return None
        try:
            self._reads[self._transport.begin_read(opaque_state, missing, local)] = sequence
            self._begun_s = time.perf_counter()
        except LayoutMismatch as error:
            return str(error)
        except PeerGone as error:
            self._recompute(sequence, str(error).partition("; ")[0])  # the cause, without the advice
        return None

    def refuse(self, sequence: Sequence) -> None:
        """Releases the peer's lease of a sequence that will not read, since it ended or recomputes its prompt."""
        if sequence.wants_read:
            with suppress(Exception):  # an unreadable state names no peer to release
                self._transport.release(_opaque_state(sequence))

    def _recompute(self, sequence: Sequence, because: str) -> None:
        self.refuse(sequence)
        sequence.has_read, sequence.transfer = True, KvTransfer(recomputed_because=because)
        sequence.stages.read, sequence.stages.is_recomputed = time.perf_counter(), True
        num_computed = sequence.num_reused * self._scheduler.pool.tokens_per_block
        self._scheduler.end_read(sequence, num_computed)
        if sequence.media and (shortage := self._scheduler.media_shortage(sequence, num_computed)) is not None:
            self._short.append((sequence, shortage))
        else:
            self.stats.recomputed += 1

    def take_short(self) -> list[tuple[Sequence, EmbeddingShortage]]:
        """Returns sequences that must recompute their prompt but lack embeddings; end them before the next step."""
        short, self._short = self._short, []
        return short

    # --- both ---

    def collect(self) -> None:
        """Processes what happened since the last step: finished and failed reads, released and expired leases."""
        if not self._reads and not self._leases:
            return
        events = self._transport.poll()
        for read in events.finished:
            sequence = self._reads.pop(read.read_id)
            self.stats.reads += 1
            self.stats.bytes += read.num_bytes
            self.stats.seconds += read.seconds
            if sequence.is_cancelled:
                self._scheduler.finish(sequence)
            else:
                self.stats.corrupted += read.is_corrupted
                sequence.has_read, sequence.transfer = True, KvTransfer(read.num_bytes, read.seconds)
                sequence.stages.read = time.perf_counter()
                self._scheduler.end_read(sequence, len(sequence.prompt_token_ids))
                self._scheduler.groups.give_back(sequence)  # before register: blocks before a window were not read
                self._scheduler.groups.register(sequence)
        for failed in events.failed:
            sequence = self._reads.pop(failed.read_id)
            self.stats.failed_reads += 1
            if sequence.is_cancelled:
                self.refuse(sequence)
                self._scheduler.finish(sequence)
            else:
                self._recompute(sequence, failed.reason)
        for lease_id in events.released:
            if self._leases.release(lease_id) is not None:
                self._end_lease(lease_id)
        for lease in self._leases.expire(self._clock()):
            self.stats.expired_leases += 1
            self._end_lease(lease.lease_id)

    def replace_transport(self, transport: KvTransport | None) -> None:
        """Closes the transport and replaces it; None keeps the closed one until the next call. No lease or read may be
        open.
        """
        self._transport.close()
        self._transport = transport or self._transport

    def close(self) -> None:
        self._transport.close()


def _opaque_state(sequence: Sequence) -> bytes:
    assert sequence.handoff is not None and sequence.handoff.opaque_state is not None
    return sequence.handoff.opaque_state

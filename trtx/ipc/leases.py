"""Leases: the blocks that a prefill engine keeps for a decode engine, with their deadlines. No torch, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

READER_GRACE_S = 1.0
"""Seconds that blocks outlive their deadline.

A reader fails every read that has not ended by the deadline on its own clock. So no reader uses a block after its
reuse, as long as the two clocks differ by less than this.
"""


@dataclass(frozen=True, slots=True)
class HandoffLease:
    lease_id: int
    block_ids: tuple[int, ...]
    deadline_s: float  # on the clock of the caller of ``expire``


class LeaseTable:
    """All leases of an engine.

    Each ends exactly once, by ``release`` or by ``expire``, and its blocks return to the caller.
    """

    def __init__(self, grace_s: float = READER_GRACE_S) -> None:
        self._grace_s = grace_s
        self._leases: dict[int, HandoffLease] = {}
        self._by_deadline: list[tuple[float, int]] = []  # heap; drops entries of ended leases when they surface

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """Number of leased blocks; a block counts once for each lease."""
        return sum(len(lease.block_ids) for lease in self._leases.values())

    def grant(self, lease_id: int, block_ids: Sequence[int], deadline_s: float) -> HandoffLease:
        """Adds a lease. Raises ValueError for an id in use: two readers would end each other's lease."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} is still held; expected an id that is not in use")
        lease = HandoffLease(lease_id, tuple(block_ids), deadline_s)
        self._leases[lease_id] = lease
        heapq.heappush(self._by_deadline, (deadline_s, lease_id))
        return lease

    def release(self, lease_id: int) -> HandoffLease | None:
        """Ends the lease. Returns None if it has ended already (late or repeated notification) or never existed."""
        return self._leases.pop(lease_id, None)

    def expire(self, now_s: float) -> list[HandoffLease]:
        """Ends the leases whose deadline plus grace period has passed, earliest first."""
        expired: list[HandoffLease] = []
        while self._by_deadline and self._by_deadline[0][0] + self._grace_s <= now_s:
            deadline_s, lease_id = heapq.heappop(self._by_deadline)
            lease = self._leases.get(lease_id)
            # An id may have been granted again after it ended: only the entry of the current grant counts.
            if lease is not None and lease.deadline_s == deadline_s:
                expired.append(self._leases.pop(lease_id))
        return expired

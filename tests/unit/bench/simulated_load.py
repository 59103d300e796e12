"""A load generator and a server as a few lines of events, which know the truth that windows are to find.

Closed loop: each slot sends its next request a gap after its last one's end. Open loop: requests come at given times.
The server computes prompts one after the other (or all at once), then gives each answer's tokens at a steady pace.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtx.bench.records import RequestRecord

MS = 1_000_000


@dataclass(frozen=True)
class Request:
    """What one request will take of the server."""

    prefill_ms: float
    itl_ms: float
    tokens: int
    fails_after_ms: float | None = None


@dataclass
class Simulated:
    """What happened: records as aiperf would write them, and when each token came."""

    records: list[RequestRecord] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)  # of each record

    def in_flight(self, at_ns: int) -> int:
        return sum(record.start_ns <= at_ns < record.end_ns for record in self.records)

    def token_ns(self) -> list[list[int]]:
        """When each token came, for each record; none where it failed."""
        return [
            [
                record.start_ns + round((record.time_to_first_token + i * request.itl_ms) * MS)
                for i in range(request.tokens)
            ]
            if record.time_to_first_token is not None
            else []
            for record, request in zip(self.records, self.requests, strict=True)
        ]

    def edges(self) -> list[int]:
        """Every moment at which the number in flight changes."""
        return sorted({at for record in self.records for at in (record.start_ns, record.end_ns)})


def closed_loop(
    requests: Sequence[Request], slots: int, *, gap_ms: float = 0, stagger_ms: float = 0, serial_prefill: bool = False
) -> Simulated:
    """``slots`` requests in flight, the first ones ``stagger_ms`` apart."""
    free = [(round(slot * stagger_ms * MS), slot) for slot in range(slots)]
    heapq.heapify(free)
    simulated, prefill_free_ns = Simulated(), 0
    for request in requests:
        at_ns, slot = heapq.heappop(free)
        prefill_free_ns = _serve(simulated, request, at_ns, prefill_free_ns if serial_prefill else at_ns)
        heapq.heappush(free, (simulated.records[-1].end_ns + round(gap_ms * MS), slot))
    return simulated


def open_loop(requests: Sequence[Request], arrivals_ms: Sequence[float], *, serial_prefill: bool = False) -> Simulated:
    """Each request at its time, which rise."""
    simulated, prefill_free_ns = Simulated(), 0
    for request, arrival_ms in zip(requests, arrivals_ms, strict=True):
        at_ns = round(arrival_ms * MS)
        prefill_free_ns = _serve(simulated, request, at_ns, prefill_free_ns if serial_prefill else at_ns)
    return simulated


def _serve(simulated: Simulated, request: Request, at_ns: int, free_ns: int) -> int:
    """One request that is sent at ``at_ns``; returns when the next prompt can be begun."""
    simulated.requests.append(request)
    if request.fails_after_ms is not None:
        end_ns = at_ns + round(request.fails_after_ms * MS)
        simulated.records.append(RequestRecord(at_ns, end_ns, "HTTP 500", *[None] * 5))
        return free_ns
    first_ns = max(at_ns, free_ns) + round(request.prefill_ms * MS)
    end_ns = first_ns + round((request.tokens - 1) * request.itl_ms * MS)
    ttft, latency = (first_ns - at_ns) / MS, (end_ns - at_ns) / MS
    itl = request.itl_ms if request.tokens > 1 and request.itl_ms else None
    simulated.records.append(RequestRecord(at_ns, end_ns, None, ttft, itl, latency, 64, request.tokens))
    return first_ns


def drawn(
    rng: random.Random, count: int, *, prefill_ms: float = 50, itl_ms: float = 5, tokens: int = 40, tail: float = 0
) -> list[Request]:
    """Requests of a mean number of tokens, exponentially spread; ``tail`` is the share that is twenty times as long."""
    lengths = [1 + round(rng.expovariate(1 / (tokens - 1))) * (20 if rng.random() < tail else 1) for _ in range(count)]
    return [Request(prefill_ms * rng.uniform(0.8, 1.2), itl_ms * rng.uniform(0.9, 1.1), length) for length in lengths]

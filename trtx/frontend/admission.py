"""Decides which requests of a frontend go on to the workers now, which wait, and which are refused.

Dynamo 1.6.1 passes every request on at once, ignores ``DYN_ENGINE_REQUEST_LIMIT``, and sends no ``Retry-After``. So
with a bound the door lets as many requests through as the workers can compute at once; the others wait here, by
priority and then in order of arrival. Remove this module once Dynamo bounds how many requests wait and how long.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

METRICS_PATH = "/trtx/queue"
_DURATIONS = 32  # the answers whose duration says when a refused client should come back
_LONGEST_RETRY_S = 60
_SLACK = 32  # entries that may stay in the heap after they have left
LAUNCHER_HEADER = b"x-trtx-launcher"
"""With the topology's namespace as its value it marks a request of the launcher, which passes every bound."""
_PRIORITY_HEADER = b"x-dynamo-request-priority"
_MOST_READ_FOR_PRIORITY = 1 << 20
"""A larger body counts with priority 0 here: parsing it would delay all streams. Its header is read all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one frontend. None: no bound."""

    max_queued_requests: int | None = None
    max_queue_s: float | None = None
    max_request_s: float | None = None
    frontends: int = 1  # how many share the workers

    @property
    def has_queue(self) -> bool:
        return self.max_queued_requests is not None or self.max_queue_s is not None

    @property
    def has_any(self) -> bool:
        return self.has_queue or self.max_request_s is not None

    def share(self, count: int) -> int:
        """This frontend's share of ``count``, rounded up."""
        return -(-count // self.frontends)


class Overloaded(Exception):
    """A request is refused. The client gets the message, and may try again after ``retry_s`` seconds."""

    def __init__(self, sentence: str, retry_s: int) -> None:
        super().__init__(sentence)
        self.retry_s = retry_s


@dataclass(slots=True)
class AdmissionCounts:
    """Counts since the start of the process."""

    refused_full: int = 0
    refused_late: int = 0
    ended_late: int = 0


@dataclass(order=True, slots=True)
class _Waiting:
    urgency: tuple[float, int]  # the smallest goes first
    turn: asyncio.Future[float] = field(compare=False)


class AdmissionQueue:
    """The requests that a frontend has let through, and those that wait. Belongs to one event loop."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds, self._clock = bounds, clock
        self.counts = AdmissionCounts()
        self._slots: int | None = None  # None: unknown, so that every request goes on at once
        self._running = 0
        self._waiting: list[_Waiting] = []  # a heap, with entries that have left it early
        self._waiting_count = 0
        self._arrivals = itertools.count()
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._booked = -math.inf  # when the last refused client should come back

    def set_slots(self, workers: int) -> None:
        """Sets how many requests all workers compute at once. 0: unknown, or no worker, which Dynamo reports."""
        self._slots = self.bounds.share(workers) if workers else None
        self._let_in()

    async def enter(self, priority: int = 0) -> float:
        """Returns the time once the request may go on, for :meth:`leave` when it has ended. Raises Overloaded."""
        if self._has_room() and not self._waiting_count:
            self._running += 1
            return self._clock()
        most = self.bounds.max_queued_requests
        if most is not None and self._waiting_count >= self.bounds.share(most):
            self.counts.refused_full += 1
            raise Overloaded(
                f"the server is overloaded: {self._waiting_count} requests already wait; try again later",
                self._retry_s(),
            )
        return await self._turn(priority)

    async def _turn(self, priority: int) -> float:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[float] = loop.create_future()
        heapq.heappush(self._waiting, _Waiting((-priority, next(self._arrivals)), turn))
        self._waiting_count += 1
        longest = self.bounds.max_queue_s
        timer = None if longest is None else loop.call_later(longest, self._give_up, turn, longest)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(turn.result())  # its turn came in the moment in which the client left
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if turn.cancelled():
                self._forget_one()

    def leave(self, since: float) -> None:
        """A request that went on at ``since`` has ended."""
        self._running -= 1
        self._durations.append(self._clock() - since)
        self._let_in()

    def _give_up(self, turn: asyncio.Future[float], longest: float) -> None:
        if not turn.done():
            self.counts.refused_late += 1
            self._forget_one()
            turn.set_exception(
                Overloaded(
                    f"the server is overloaded: no worker was free within {longest:g} s; try again later",
                    self._retry_s(),
                )
            )

    def _forget_one(self) -> None:
        """Counts an entry out that stays in the heap. The heap is rebuilt once most of its entries have left."""
        self._waiting_count -= 1
        if len(self._waiting) > 2 * self._waiting_count + _SLACK:
            self._waiting = [one for one in self._waiting if not one.turn.done()]
            heapq.heapify(self._waiting)

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            turn = heapq.heappop(self._waiting).turn
            if not turn.done():
                self._waiting_count -= 1
                self._running += 1
                turn.set_result(self._clock())

    def _has_room(self) -> bool:
        return self._slots is None or self._running < self._slots

    def _retry_s(self) -> int:
        """When a refused client should come back: behind the waiting requests and those who were refused before.

        At the pace that the last answers' duration gives, so that the clients don't all come back at once.
        """
        if not self._durations or self._slots is None:
            return math.ceil(self.bounds.max_queue_s or 1)
        now, each = self._clock(), sum(self._durations) / len(self._durations) / self._slots
        self._booked = min(max(self._booked, now + self._waiting_count * each) + each, now + _LONGEST_RETRY_S)
        return max(1, math.ceil(self._booked - now))

    def metrics(self) -> str:
        """The state as Prometheus text."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        gauges = {"waiting_requests": self._waiting_count, "running_requests": self._running}
        if self._slots is not None:
            gauges["request_slots"] = self._slots
        for name, value in gauges.items():
            yield from (f"# TYPE trtx_frontend_{name} gauge", f"trtx_frontend_{name} {value}")
        yield "# TYPE trtx_frontend_refused_requests_total counter"
        yield f'trtx_frontend_refused_requests_total{{reason="queue full"}} {self.counts.refused_full}'
        yield f'trtx_frontend_refused_requests_total{{reason="queue time"}} {self.counts.refused_late}'
        yield "# TYPE trtx_frontend_timed_out_requests_total counter"
        yield f"trtx_frontend_timed_out_requests_total {self.counts.ended_late}"


def priority_of(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> int:
    """The priority of a request, as Dynamo reads it: the header, else ``nvext.agent_hints.priority``; higher is first.

    A value that Dynamo would refuse counts as 0.
    """
    for name, value in headers:
        if name == _PRIORITY_HEADER:
            return _whole(value)
    if b'"priority"' not in body or len(body) > _MOST_READ_FOR_PRIORITY:
        return 0
    try:
        return _whole(json.loads(body)["nvext"]["agent_hints"]["priority"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return 0


def _whole(value: object) -> int:
    try:
        return int(value) if isinstance(value, bytes | int) else 0
    except ValueError:
        return 0

"""Decides which requests of a frontend go to the workers at once, which wait, and which are refused.

Dynamo 1.6.1 passes every request on at once, ignores ``DYN_ENGINE_REQUEST_LIMIT``, and sends no ``Retry-After``. So
with a bound the HTTP proxy lets as many requests through as the workers can compute at once; the others wait here, by
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_DURATIONS = 32  # number of answers whose durations give the Retry-After of a refusal
_LONGEST_RETRY_S = 60
_SLACK = 32  # requests that may stay in the heap although they have left the queue
LAUNCHER_HEADER = b"x-trtx-launcher"
"""Marks a request of the launcher, which no bound applies to. Its value is the topology's namespace."""
_PRIORITY_HEADER = b"x-dynamo-request-priority"
_MOST_READ_FOR_PRIORITY = 1 << 20
"""Largest body that is parsed for its priority, in bytes; larger ones would delay streams. Headers always count."""


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
class Turn:
    """A request's place in the queue, or a worker's slot for it. Await ``comes`` before the request goes on.

    ``comes`` raises Overloaded if the queue is full, or once the request has waited too long.
    """

    urgency: tuple[float, int]  # the smallest goes first
    comes: asyncio.Future[None] = field(compare=False)
    since: float | None = field(default=None, compare=False)  # when it took its slot; None: it has none
    is_waiting: bool = field(default=False, compare=False)
    timer: asyncio.TimerHandle | None = field(default=None, compare=False)


class AdmissionQueue:
    """Limits the requests that a frontend passes on; the others wait, or are refused. Belongs to one event loop."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds, self._clock = bounds, clock
        self.counts = AdmissionCounts()
        most = bounds.max_queued_requests
        self._most_waiting = math.inf if most is None else bounds.share(most)
        self.slots: int | None = None  # None: unknown, so that every request goes on at once
        self.running_requests = 0
        self._waiting: list[Turn] = []  # a heap; requests that left the queue early stay in it for a while
        self.waiting_requests = 0
        self._arrivals = itertools.count()
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._booked = -math.inf  # when the last refused client may try again

    def set_slots(self, workers: int) -> None:
        """Sets the number of requests that all workers compute at once. 0: unknown; then nothing waits."""
        self.slots = self.bounds.share(workers) if workers else None
        self._let_in()

    @property
    def is_full(self) -> bool:
        """Whether a request that arrives now is refused."""
        return self.waiting_requests >= self._most_waiting

    def refusal(self) -> Overloaded:
        """Counts a request that arrived at a full queue, and returns the error that refuses it."""
        self.counts.refused_full += 1
        sentence = f"the server is overloaded: {self.waiting_requests} requests already wait; try again later"
        return Overloaded(sentence, self._retry_s())

    def enter(self, priority: int = 0) -> Turn:
        """Takes a slot or a place for a request, which ends with :meth:`leave`."""
        loop = asyncio.get_running_loop()
        turn = Turn((-priority, next(self._arrivals)), loop.create_future())
        if self.is_full:
            turn.comes.set_exception(self.refusal())
            turn.comes.exception()  # its client may leave before it is read
            return turn
        if not self.waiting_requests and self._has_room():
            self._go_on(turn)
            return turn
        turn.is_waiting = True
        heapq.heappush(self._waiting, turn)
        self.waiting_requests += 1
        if (longest := self.bounds.max_queue_s) is not None:
            turn.timer = loop.call_later(longest, self._give_up, turn, longest)
        return turn

    def leave(self, turn: Turn) -> None:
        """Frees the slot or the place of a request that has ended, or whose client has left. Idempotent."""
        if turn.is_waiting:
            self._forget(turn)
            turn.comes.cancel()
        elif turn.since is not None:
            self.running_requests -= 1
            self._durations.append(self._clock() - turn.since)
            turn.since = None
            self._let_in()

    def _go_on(self, turn: Turn) -> None:
        self.running_requests += 1
        turn.since = self._clock()
        if not turn.comes.done():
            turn.comes.set_result(None)

    def _give_up(self, turn: Turn, longest: float) -> None:
        self.counts.refused_late += 1
        self._forget(turn)
        sentence = f"the server is overloaded: no worker was free within {longest:g} s; try again later"
        if not turn.comes.done():
            turn.comes.set_exception(Overloaded(sentence, self._retry_s()))

    def _forget(self, turn: Turn) -> None:
        """Removes a request from the counts, but not from the heap, which is rebuilt from time to time."""
        self._stop_waiting(turn)
        if len(self._waiting) > 2 * self.waiting_requests + _SLACK:
            self._waiting = [one for one in self._waiting if one.is_waiting]
            heapq.heapify(self._waiting)

    def _stop_waiting(self, turn: Turn) -> None:
        turn.is_waiting = False
        self.waiting_requests -= 1
        if turn.timer is not None:
            turn.timer.cancel()

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            turn = heapq.heappop(self._waiting)
            if turn.is_waiting:
                self._stop_waiting(turn)
                self._go_on(turn)

    def _has_room(self) -> bool:
        return self.slots is None or self.running_requests < self.slots

    def _retry_s(self) -> int:
        """The ``Retry-After`` in seconds: the time until all waiting requests, and all clients that were refused
        before, will have been served.

        The estimate uses the durations of the last answers. Each refused client gets a later time than the one before,
        so that they don't all come back at once.
        """
        if not self._durations or self.slots is None:
            return math.ceil(self.bounds.max_queue_s or 1)
        now, each = self._clock(), sum(self._durations) / len(self._durations) / self.slots
        self._booked = min(max(self._booked, now + self.waiting_requests * each) + each, now + _LONGEST_RETRY_S)
        return max(1, math.ceil(self._booked - now))


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

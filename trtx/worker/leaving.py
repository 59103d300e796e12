"""How a worker goes: told to stop, or because its engine died; and what it stays for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable

from trtx.worker.status import StatusFile

logger = logging.getLogger(__name__)

GONE_SECONDS = 0.3
"""How long frontends take to notice that a worker has left, generously: 0.12 s was seen with file discovery."""
WITHDRAW_SECONDS = 1.0
"""How long taking a model's card out of discovery may take, where discovery may be what fails."""
UNREAD_SECONDS = 2.0
"""How long a draining prefill worker keeps handoffs of which none ends. A decode worker reads as soon as it has a slot
for the request, milliseconds after prefill's answer; one that comes later than this computes the prompt itself."""


class Leaving:
    """``engine_died`` tells the process how to exit; ``on_engine_death`` is called at once.

    ``withdraw``: of a worker that others serve without, takes its model's card out of discovery. Dynamo 1.4.2 removes a
    worker's endpoint first and its card when the process ends: all between, it sees a kind of worker of which there is
    none, and answers every request for the model, also one that needs no such worker, with a 503 "not ready".
    """

    def __init__(self, name: str, status: StatusFile) -> None:
        self.is_draining = False
        self.engine_died = False
        self.ends_engine = False  # of this worker's own will: a request that it cut off sees that, and it is no death
        self.on_engine_death: Callable[[], None] = lambda: None
        self.withdraw: Callable[[], Awaitable[None]] | None = None
        self._name = name
        self._status = status
        self._deregistered = asyncio.Event()
        self._ending: asyncio.Future[None] | None = None  # a loop holds its tasks weakly

    def drain(self) -> None:
        """Nothing new begins. Dynamo's ``Worker`` has deregistered this one by then."""
        self.is_draining = True
        self._deregistered.set()

    def engine_is_dead(self, reason: str, *, open_requests: int) -> None:
        """A dead engine ends its worker: the launcher restarts both, and Dynamo moves the requests elsewhere."""
        if self.engine_died or self.ends_engine:
            return
        self.engine_died = True
        self.on_engine_death()
        told = f"the engine died{': ' if reason else ''}{reason}"
        self._status.update(error=told)
        logger.error("%s: %s; this worker ends, %d requests were open", self._name, told, open_requests)
        if self.withdraw is None:
            _end()
        else:
            self._ending = asyncio.ensure_future(self._end_withdrawn())

    async def _end_withdrawn(self) -> None:
        await self.withdrawn()
        await asyncio.sleep(GONE_SECONDS)  # the endpoint goes once frontends know that the card has
        _end()

    async def withdrawn(self) -> None:
        """Without its card, where that can go first; once is enough."""
        withdraw, self.withdraw = self.withdraw, None
        if withdraw is None:
            return
        try:
            await asyncio.wait_for(withdraw(), WITHDRAW_SECONDS)
        except Exception as error:
            logger.warning("%s: its model's card stays until the process has ended (%r)", self._name, error)

    async def until_gone(self) -> None:
        """Dynamo moves a request on at once, up to its migration limit: a worker that is still in its routing table
        would get it back and use the limit up (seen with the KV router of 1.4.2)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deregistered.wait(), GONE_SECONDS)
        await asyncio.sleep(GONE_SECONDS)


def _end() -> None:
    """The runtime's own way out takes the discovery records along, so that nothing is routed here any more."""
    os.kill(os.getpid(), signal.SIGTERM)


class UnreadHandoffs:
    """Tells handoffs that decode workers are still about to read from those whose readers are gone.

    A reader that died releases nothing: its leases stay out until their deadline, a minute, and there is no telling
    from here whose they are. So handoffs count as wanted for as long as, now and then, one of them ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unread: int | None = None
        self._since = 0.0

    def requests_are_open(self) -> None:
        """Each of them may still lead to a handoff: waiting begins when the last one has ended."""
        self._unread = None

    def are_wanted(self, unread: int) -> bool:
        """``unread``: now. False from when there are none, or none has ended for ``UNREAD_SECONDS``."""
        now = self._clock()
        if unread != self._unread:
            self._unread, self._since = unread, now
        return unread > 0 and now - self._since < UNREAD_SECONDS

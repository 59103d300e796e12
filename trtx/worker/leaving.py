"""Stops a worker after a stop signal or its engine's death, and waits until other processes no longer need it."""

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
"""Upper estimate of how long frontends take to notice that a worker has left; 0.12 s was seen with file discovery."""
WITHDRAW_SECONDS = 1.0
"""Timeout for removing a model card from discovery. It is short because discovery itself may be what fails."""
UNREAD_SECONDS = 2.0
"""How long a draining prefill worker waits for its unread handoffs if none of them ends.

A decode worker reads the KV as soon as it has a slot for the request, milliseconds after prefill's answer. A decode
worker that comes later than this computes the prompt itself.
"""


class Leaving:
    """State of a worker that is stopping.

    ``engine_died`` decides the process's exit code; ``on_engine_death`` is called as soon as the death is known.

    ``withdraw`` removes the worker's model card from discovery; it is set for workers that the topology can serve
    without. Dynamo 1.6.1 removes a worker's endpoint first, and its card seconds later. In between it sees
    a worker type without instances, and answers every request for the model with a 503 "not ready", including requests
    that need no such worker.
    """

    def __init__(self, name: str, status: StatusFile) -> None:
        self.is_draining = False
        self.engine_died = False
        # the worker shuts the engine down itself, so an error in a request that this cut off is not an engine death
        self.ends_engine = False
        self.on_engine_death: Callable[[], None] = lambda: None
        self.withdraw: Callable[[], Awaitable[None]] | None = None
        self._name = name
        self._status = status
        self._deregistered = asyncio.Event()
        self._ending: asyncio.Future[None] | None = None  # the event loop only keeps weak references to tasks

    def drain(self) -> None:
        """Makes the worker refuse new requests. Dynamo's ``Worker`` has deregistered it by then."""
        self.is_draining = True
        self._deregistered.set()

    def engine_is_dead(self, reason: str, *, open_requests: int) -> None:
        """Records the engine's death and ends the worker.

        The launcher restarts both, and Dynamo migrates the open requests.
        """
        if self.engine_died or self.ends_engine:
            return
        self.engine_died = True
        self.on_engine_death()
        cause = f"the engine died{': ' if reason else ''}{reason}"
        self._status.update(error=cause)
        logger.error("%s: %s; this worker ends, %d requests were open", self._name, cause, open_requests)
        if self.withdraw is None:
            _end()
        else:
            self._ending = asyncio.ensure_future(self._end_withdrawn())

    async def _end_withdrawn(self) -> None:
        await self.withdrawn()
        # the endpoint must outlive the card until all frontends have noticed that the card is gone
        await asyncio.sleep(GONE_SECONDS)
        _end()

    async def withdrawn(self) -> None:
        """Removes the model card from discovery, if this worker can do so before it ends.

        Only the first call has an effect.
        """
        withdraw, self.withdraw = self.withdraw, None
        if withdraw is None:
            return
        try:
            await asyncio.wait_for(withdraw(), WITHDRAW_SECONDS)
        except Exception as error:
            logger.warning("%s: its model's card stays until the process has ended (%r)", self._name, error)

    async def until_gone(self) -> None:
        """Waits until this worker has left the frontends' routing tables.

        Dynamo migrates a request at once, up to its migration limit. While this worker is in the routing table, the
        request could come back to it and use up the limit (seen with 1.6.1 and ``least-loaded``).
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deregistered.wait(), GONE_SECONDS)
        await asyncio.sleep(GONE_SECONDS)


def _end() -> None:
    """Ends the process by SIGTERM, so that the runtime deletes the discovery records and routing stops."""
    os.kill(os.getpid(), signal.SIGTERM)


class UnreadHandoffs:
    """Distinguishes handoffs that decode workers are about to read from those whose readers are gone.

    A decode worker that died releases nothing: its leases stay until their deadline, one minute, and a prefill worker
    can't see which leases those are. So handoffs count as wanted as long as one of them ends from time to time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unread: int | None = None
        self._since = 0.0

    def requests_are_open(self) -> None:
        """Restarts the waiting period, which begins when the last request has ended: each may still lead to a
        handoff.
        """
        self._unread = None

    def are_wanted(self, unread: int) -> bool:
        """False if ``unread``, the current number of handoffs, is 0 or has not changed for ``UNREAD_SECONDS``."""
        now = self._clock()
        if unread != self._unread:
            self._unread, self._since = unread, now
        return unread > 0 and now - self._since < UNREAD_SECONDS

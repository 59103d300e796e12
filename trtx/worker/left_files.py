"""Removes files that dead workers left in the scratch directory, as soon as all of their processes have ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class LeftFiles:
    """Calls ``remove`` until nothing is left to remove. Belongs to one event loop.

    ``remove`` removes what it can and returns the pids of dead workers' processes that are still running, as
    :func:`~trtx.engine.api.remove_left` does.
    """

    def __init__(self, remove: Callable[[], Sequence[int]]) -> None:
        self._remove = remove
        self._waiting: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Returns after the first call of ``remove``.

        Further calls follow in a task, each after one of those processes has ended.
        """
        lingering = await asyncio.to_thread(self._remove)
        if lingering:
            self._waiting = asyncio.create_task(self._until_removed(lingering), name="left-files")

    async def _until_removed(self, lingering: Sequence[int]) -> None:
        try:
            while lingering:
                await _first_end(lingering)
                lingering = await asyncio.to_thread(self._remove)
        # no file descriptor is available; the files go when the topology's directory is removed
        except OSError as error:
            logger.warning("files of dead workers are left until the topology ends: %s", error)

    async def close(self) -> None:
        """Cancels the task that waits for processes."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)


async def _first_end(pids: Sequence[int]) -> None:
    """Returns once one of the processes ``pids`` has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handles: list[int] = []
    try:
        for pid in pids:
            try:
                handles.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            loop.add_reader(handles[-1], ended.set)
        await ended.wait()
    finally:
        for handle in handles:
            loop.remove_reader(handle)
            os.close(handle)

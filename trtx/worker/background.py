"""Work of a worker beside its requests, ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


class Background:
    """Tasks that nobody awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls at once where ``loop`` runs here, else soon, there. What ends a request needs it: a generator whose reader
    has gone may be closed by whoever drops it last, in a thread that runs no loop."""
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if is_here:
        call()
    else:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(call)

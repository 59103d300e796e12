"""Background tasks of a worker, and calls into its event loop from other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """A set of asyncio tasks that run until they finish or :meth:`cancel` is called. Their results are not awaited."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop only keeps weak references to tasks

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()


async def all_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs ``work`` concurrently and returns the results in order. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Runs ``call`` on ``loop``: immediately if the caller runs on it, otherwise soon.

    Clean-up at the end of a request needs this: when a client disconnects, Python may close the request's generator in
    the thread that drops the last reference, which may run no event loop.
    """
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if is_here:
        call()
    else:
        with suppress(RuntimeError):  # the loop is closed because the process is ending
            loop.call_soon_threadsafe(call)

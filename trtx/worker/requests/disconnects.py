"""Runs work for a request, and cancels it when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from dynamo._core import Context

from trtx.worker.background import on_loop

_T = TypeVar("_T")

CLIENT_REQUEST: ContextVar[Context] = ContextVar("client_request")
"""The client's request in the tasks of :func:`unless_gone`. A call to another worker continues its trace."""


class ClientGone(Exception):
    """The client disconnected before the request reached the engine."""


async def unless_gone(work: Coroutine[Any, Any, _T], context: Context) -> _T:
    """Returns the result of ``work``. Cancels it and raises ClientGone if the client disconnects first."""
    variables = copy_context()
    variables.run(CLIENT_REQUEST.set, context)
    working = asyncio.get_running_loop().create_task(work, context=variables)
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        cancel(stopped)
        cancel(working)


def cancel(work: asyncio.Future[Any]) -> None:
    """Cancels ``work`` without waiting for it: a generator that is being closed may not await.

    ``work`` frees what it holds.
    """
    on_loop(work.get_loop(), work.cancel)

"""Rows that the engine publishes beside tokens (iteration statistics, KV events), kept until somebody takes them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

_ASYNC_POLL_S = 0.005


class Feed:
    """The latest ``max_rows`` rows. One thread adds, any other takes; a row is taken once."""

    def __init__(self, max_rows: int) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=max_rows)
        self._changed = threading.Condition()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify_all()

    def take(self, timeout: float | None) -> list[dict[str, Any]]:
        """Everything there is; with nothing there, waits up to ``timeout`` seconds (None: for ever) for a first row."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._rows), timeout)
            taken = list(self._rows)
            self._rows.clear()
            return taken

    async def rows(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """Yields rows until none has come for ``timeout`` seconds (None: at once when there are no more)."""
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            taken = self.take(0.0)
            for row in taken:
                yield row
            if taken:
                deadline = time.monotonic() + (timeout or 0.0)
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(_ASYNC_POLL_S, left))

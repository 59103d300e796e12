"""Buffers for what the engine reports in addition to tokens: iteration statistics and KV events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

_ASYNC_POLL_S = 0.005


class Feed:
    """A thread-safe buffer of the latest ``max_rows`` rows. Each row is taken once."""

    def __init__(self, max_rows: int) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=max_rows)
        self._changed = threading.Condition()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify_all()

    def take(self, timeout: float | None) -> list[dict[str, Any]]:
        """Returns and clears all rows; if there are none, waits up to ``timeout`` seconds (None: forever) for one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._rows), timeout)
            taken = list(self._rows)
            self._rows.clear()
            return taken

    async def rows(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """Yields rows until no row has arrived for ``timeout`` seconds (None: 0 seconds)."""
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

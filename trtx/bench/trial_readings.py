"""Takes readings of a topology about once a second during a trial, in a daemon thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from trtx.bench.readings import ServerReading

EVERY_S = 1.0  # like nvidia-smi -l 1; clocks and processes change within seconds
_LAST_S = 5.0  # limit for the last reading, so that a hanging driver doesn't block the run


class Watch:
    """The readings of one trial: one on entry, then one per second, and one on exit."""

    def __init__(self, read: Callable[[], ServerReading] | None, every_s: float = EVERY_S) -> None:
        """``read``: takes one reading; None if no readings are available."""
        self._read = read
        self._every_s = every_s
        self._left = threading.Event()
        self._found: list[ServerReading] = []
        self._thread = threading.Thread(target=self._run, name="readings", daemon=True)

    @property
    def readings(self) -> tuple[ServerReading, ...]:
        """The readings so far, in order of time."""
        return tuple(self._found)

    def __enter__(self) -> Self:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._left.set()
        if self._read is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        assert self._read is not None
        while True:
            is_last = self._left.is_set()
            self._found.append(self._read())
            if is_last:
                return
            self._left.wait(self._every_s)

"""SIGINT and SIGTERM as a flag: the handler counts, and whoever waits looks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from trtx.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """How often we were asked to stop, and by which signal first."""

    def __init__(self) -> None:
        self.count = 0
        self.signal_number = 0

    @property
    def is_hurried(self) -> bool:
        """Asked twice: end everything at once."""
        return self.count > 1

    def check(self) -> None:
        """Raises Interrupted if we were asked to stop."""
        if self.count:
            raise Interrupted(self.signal_number)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.signal_number = self.signal_number or signal_number


@contextlib.contextmanager
def catch_signals(interruption: Interruption) -> Iterator[None]:
    """Hands SIGINT and SIGTERM to ``interruption`` while inside. Off the main thread, signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interruption._handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

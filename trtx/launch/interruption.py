"""SIGINT, SIGTERM and SIGHUP as a flag: the handler counts, and whoever waits looks."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from trtx.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C can arrive twice: from the terminal, and from a parent such as make or timeout that passes it on.
_SAME_S = 0.3


class Interruption:
    """How often we were asked to stop, and by which signal first."""

    def __init__(self) -> None:
        self.count = 0
        self.signal_number = 0
        self._last = -_SAME_S

    @property
    def is_hurried(self) -> bool:
        """Asked twice: end everything at once."""
        return self.count > 1

    def check(self) -> None:
        """Raises Interrupted if we were asked to stop."""
        if self.count:
            raise Interrupted(self.signal_number)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= _SAME_S:
            self.count += 1
        self._last = now
        self.signal_number = self.signal_number or signal_number


@contextlib.contextmanager
def catch_signals(interruption: Interruption) -> Iterator[None]:
    """Hands SIGINT, SIGTERM and SIGHUP to ``interruption`` while inside. Off the main thread, signals stay as they are.

    SIGHUP stays ignored where it was: that is what ``nohup`` asks for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [one for one in _SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, interruption._handle) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

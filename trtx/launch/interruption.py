"""Turns SIGINT, SIGTERM and SIGHUP into a flag: the handler counts, and waiting code checks the count."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from trtx.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C can arrive twice: from the terminal, and from a parent such as make or timeout that forwards it.
_SAME_S = 0.3


class Interruption:
    """The number of stop signals that this process received, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.signal_number = 0
        self._last = -_SAME_S

    @property
    def is_hurried(self) -> bool:
        """True after the second request: kill everything at once."""
        return self.count > 1

    def check(self) -> None:
        """Raises Interrupted if the process was asked to stop."""
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
    """Directs SIGINT, SIGTERM and SIGHUP to ``interruption`` inside the block. Has no effect outside the main thread.

    SIGHUP stays ignored if it was ignored, as ``nohup`` requires.
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

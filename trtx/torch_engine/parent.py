"""What the processes of the torch engine do about the process that started them: they end when it does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from trtx.torch_engine.channel import Channel

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Message = TypeVar("Message")


def die_with_parent() -> None:
    """The kernel ends this process with the thread that started it; the socket's end of file is the other net.

    SIGINT and SIGTERM are ignored: a terminal sends them to the whole group, and the parent decides when this ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def read_parent(channel: Channel[Message], take: Callable[[Message], None]) -> None:
    """For a thread: ``take`` gets what the parent says. Its end of file ends this process at once."""
    try:
        while (message := channel.receive()) is not None:
            take(message)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

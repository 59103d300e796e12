"""Ties a child process of the torch engine to its parent: the child ends when the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from trtx.errors import UsageError
from trtx.ipc.child_messages import Fatal
from trtx.torch_engine.channel import Channel

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Message = TypeVar("Message")


def die_with_parent() -> None:
    """Makes the kernel kill this process when the parent's thread that started it ends.

    End of file on the socket is the second safeguard. The process ignores SIGINT and SIGTERM: a terminal sends them to
    the whole process group, and the parent decides when this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def exits_after(channel: Channel[Message]) -> Iterator[None]:
    """Ends this process after the body: with exit status 0, or with 1 and a ``Fatal`` message to the parent."""
    try:
        yield
    except UsageError as error:
        channel.send(Fatal(str(error), is_usage=True))
        os._exit(1)
    except BaseException as error:
        traceback.print_exc()
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(1)  # no destructor may hang on a device in an unknown state
    os._exit(0)


def read_parent(channel: Channel[Message], take: Callable[[Message], None]) -> None:
    """Calls ``take`` with every message from the parent. Run it in a thread of its own.

    End of file ends this process at once with exit status 0; an exception ends it with 1.
    """
    try:
        while (message := channel.receive()) is not None:
            take(message)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

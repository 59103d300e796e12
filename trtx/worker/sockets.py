"""Sets ``TCP_NODELAY`` on the worker's request-plane sockets; Dynamo 1.4.2 leaves it unset on one of them.

Without it, Nagle's algorithm holds a small write back until the peer's delayed acknowledgement, 40 ms. This was seen
between the response stream and a frontend, and disappeared with the option set here (upstream PR #14643 covers the
frontend's HTTP sockets). The Rust runtime owns these sockets, so they are found by file descriptor. Remove this module
once a check without it passes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time

_ON = ctypes.c_int(1)
# PyDLL keeps the GIL: the call takes 0.2 us, and releasing the GIL would cost a thread switch for each descriptor.
_LIBC = ctypes.PyDLL(None)


class NoDelay:
    """Keeps ``TCP_NODELAY`` set on the sockets of a worker's streams.

    Dynamo 1.4.2 has connected a stream's socket by the time it requests the stream's chunks, so one scan over all
    sockets covers all streams requested before it. A scan of 256 open sockets takes half a millisecond; if 256 streams
    began together, one scan each would delay the last of them by 130 ms.
    """

    def __init__(self) -> None:
        self._looked_ns = 0

    def cover(self, asked_ns: int) -> None:
        """Covers a stream that was requested at ``asked_ns`` (``time.monotonic_ns``)."""
        if asked_ns >= self._looked_ns:
            self._looked_ns = time.monotonic_ns()
            set_nodelay_everywhere()


def set_nodelay_everywhere() -> None:
    """Sets ``TCP_NODELAY`` on every open TCP socket of this process; 2 us per descriptor.

    Calls setsockopt by descriptor number instead of duplicating descriptors into Python sockets. For a descriptor that
    is not a TCP socket, or has been closed, the kernel returns an error, which is ignored.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- names only, ten times faster than Path objects
        _LIBC.setsockopt(
            int(name), socket.IPPROTO_TCP, socket.TCP_NODELAY, ctypes.byref(_ON), ctypes.sizeof(ctypes.c_int)
        )

"""``TCP_NODELAY`` on the worker's request-plane sockets, one of which Dynamo 1.4.2 leaves without it.

Nagle's algorithm then holds a small write until the peer's delayed acknowledgement, 40 ms: seen between the response
stream and a frontend, gone with the option set here (upstream PR #14643 covers the frontend's HTTP sockets). The Rust
runtime owns these sockets, so they are found by file descriptor. Drop this module once a check without it passes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time

_ON = ctypes.c_int(1)
# PyDLL keeps the GIL: the call takes 0.2 us, and giving the GIL away here would cost a switch for each descriptor.
_LIBC = ctypes.PyDLL(None)


class NoDelay:
    """``TCP_NODELAY`` for a worker's streams. Dynamo 1.4.2 has connected a stream's socket when it asks for its chunks.

    So a look at all sockets serves all streams that were asked for before it. With 256 open it takes half a
    millisecond: where as many begin together, one look each would hold up the last of them by 130 ms.
    """

    def __init__(self) -> None:
        self._looked_ns = 0

    def cover(self, asked_ns: int) -> None:
        """For a stream that was asked for at that time, of the monotonic clock."""
        if asked_ns >= self._looked_ns:
            self._looked_ns = time.monotonic_ns()
            set_nodelay_everywhere()


def set_nodelay_everywhere() -> None:
    """Sets ``TCP_NODELAY`` on every TCP socket this process has open; 2 us each.

    Asks the kernel directly by number instead of duplicating descriptors into Python sockets: a number that is no
    socket, no TCP socket, or was closed meanwhile, is refused by the kernel and left alone.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- names alone, ten times faster than Path objects
        _LIBC.setsockopt(
            int(name), socket.IPPROTO_TCP, socket.TCP_NODELAY, ctypes.byref(_ON), ctypes.sizeof(ctypes.c_int)
        )

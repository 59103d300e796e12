"""Sets ``TCP_NODELAY`` on the worker's request-plane sockets; Dynamo 1.4.2 leaves it unset on one of them.

Without the option, Nagle's algorithm holds a small write back until the peer's delayed acknowledgement, which takes
40 ms. This delayed response streams to a frontend, until the option was set here; upstream PR #14643 sets it on the
frontend's HTTP sockets only. The Rust runtime owns the worker's sockets, so this module finds them by file descriptor.
Remove the module when a Dynamo release has no such delay without it.
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

    Dynamo 1.4.2 connects a stream's socket before it requests the stream's chunks, so one scan over all sockets covers
    every stream that was requested before the scan. A scan of 256 open sockets takes half a millisecond. One scan per
    stream would delay the last of 256 streams that begin together by 130 ms.
    """

    def __init__(self) -> None:
        self._looked_ns = 0

    def cover(self, asked_ns: int) -> None:
        """Scans the sockets, unless a scan has begun after ``asked_ns``, the request's time (``time.monotonic_ns``)."""
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

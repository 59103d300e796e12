"""``TCP_NODELAY`` on the frontend's HTTP listener, which Dynamo 1.6.1 leaves off.

Nagle's algorithm then delays the second small write of a response until the client's delayed acknowledgement, which
adds 40 ms to the first token on every kept-alive connection (upstream PR #14643, open when this was written). The Rust
runtime owns the listener and exposes none of its options, so this module finds it by file descriptor. Remove it once a
Dynamo release contains that change and ``benchmarks/streaming.py`` shows the same TTFT without this module.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time

_FD_DIR = "/proc/self/fd"


def listening_on(port: int) -> socket.socket | None:
    """This process's TCP socket that listens on ``port``, or None.

    The caller must detach it, because another component owns the file descriptor.
    """
    for name in os.listdir(_FD_DIR):  # noqa: PTH208 -- ten times faster than Path objects
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=int(name))
        except OSError:  # closed since the listing
            continue
        if _listens_on(found, port):
            return found
        found.detach()
    return None


def _listens_on(found: socket.socket, port: int) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and found.getsockname()[1] == port
    except OSError:  # closed since the listing
        return False


class NodelayListener:
    """Waits in a thread until this process listens on ``port``, and sets ``TCP_NODELAY`` on the listener.

    Accepted sockets inherit the option from the listener, so the thread then ends.
    """

    POLL_SECONDS = 0.002

    def __init__(self, port: int) -> None:
        self._port = port
        self.found = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodelay-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while (listener := listening_on(self._port)) is None:
            time.sleep(self.POLL_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.detach()  # the runtime owns the descriptor
        self.found.set()

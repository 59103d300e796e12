"""``TCP_NODELAY`` on the frontend's HTTP listener, which Dynamo 1.4.2 leaves off.

Nagle's algorithm then holds the second small write of a response until the client's delayed acknowledgement: 40 ms
on every first token of a kept-alive connection (upstream PR #14643, open when this was written). The Rust runtime
owns the listener and exposes none of its options, so it is found by file descriptor. Drop this module once a Dynamo
release contains that change and ``benchmarks/streaming.py`` shows the same TTFT without it.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time

_FD_DIR = "/proc/self/fd"


def listening_on(port: int) -> socket.socket | None:
    """This process's TCP socket that listens on ``port``, or None. Detach it: its descriptor belongs to its owner."""
    for name in os.listdir(_FD_DIR):  # noqa: PTH208 -- names alone, ten times faster than Path objects
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
    """Waits in a thread until this process listens on ``port``, sets ``TCP_NODELAY`` there, and ends.

    Sockets accepted from a listener inherit the option, so nothing is left to do afterwards.
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
        listener.detach()  # the descriptor is the runtime's, never ours to close
        self.found.set()

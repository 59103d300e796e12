"""Chooses a topology's ports together, and holds them with open sockets until its processes start."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

from trtx.errors import LaunchError, UsageError

_LOOPBACK = "127.0.0.1"
_EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000
_LIMIT = 32768
"""Ports are drawn below this one: Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed 16-bit number, and exits otherwise."""
_ENOUGH = 2000
LOWEST_EPHEMERAL = _LOWEST + _ENOUGH
"""Lowest acceptable start of the ephemeral port range.

With a lower one, outgoing connections could take ports on which workers are about to listen.
"""
_ATTEMPTS = 2000
ANOTHER_PORT = "choose another with --port, or 0 for any free one"
OF_SEVERAL_HOSTS = "end the process that uses it, or start trtx serve --hosts with another --port"


class PortHolder:
    """Ports that this process holds by listening on them.

    A socket that is only bound would not keep other listeners away.
    """

    def __init__(self, ephemeral_file: Path = _EPHEMERAL_FILE) -> None:
        """``ephemeral_file`` contains the first and last ephemeral port."""
        self._ephemeral_file = ephemeral_file
        self._held: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def hold(self, host: str, port: int, way_out: str = ANOTHER_PORT) -> int:
        """Takes ``port`` on ``host``; 0 takes any free one.

        Raises UsageError that names the process using it and ends with ``way_out``.
        """
        with self._lock:
            if port in self._held:
                return port  # held by an earlier plan of this process; plans are served one after another
            if port == 0:
                return self._hold_any(host)
            try:
                self._held[port] = _bind(host, port)
            except OSError as error:
                raise _not_available(host, port, error, way_out) from error
            return port

    def hold_internal(self, count: int) -> tuple[int, ...]:
        """Takes ``count`` free ports below 32768 on loopback, different from all ports held."""
        with self._lock:
            return tuple(self._hold_any(_LOOPBACK) for _ in range(count))

    def release(self, ports: Iterable[int]) -> None:
        """Frees ports so that the processes they were held for can listen; unknown ports are ignored."""
        with self._lock:
            for port in ports:
                if held := self._held.pop(port, None):
                    held.close()

    def _hold_any(self, host: str) -> int:
        """Takes a free port, if possible below the ephemeral range, where outgoing connections can't take it first."""
        low, high = self._range()
        for _ in range(_ATTEMPTS):
            port = random.SystemRandom().randrange(low, high)
            if port not in self._held:
                try:
                    self._held[port] = _bind(host, port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise _not_available(host, port, error, ANOTHER_PORT) from error
                else:
                    return port
        raise LaunchError(f"no free port between {low} and {high} on {host}; end a process that listens there")

    def _range(self) -> tuple[int, int]:
        try:
            first = int(self._ephemeral_file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            first = _LIMIT
        high = min(first, _LIMIT)
        return (_LOWEST, high if high >= LOWEST_EPHEMERAL else _LIMIT)


HOLDER = PortHolder()


def taken(host: str, port: int) -> str | None:
    """For example ``port 8000 on 127.0.0.1 is in use by python3 (pid 7)``, found by binding it; None if it is free."""
    try:
        _bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _in_use(host, port)
    return None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Like the servers: connections in TIME_WAIT do not block the port, a listener does.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound


def _not_available(host: str, port: int, error: OSError, way_out: str) -> UsageError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"--host {host!r} is not an address of this machine ({error.strerror}); use 127.0.0.1")
    if error.errno != errno.EADDRINUSE:
        return UsageError(f"port {port} on {host} can't be used ({error.strerror}); {way_out}")
    return UsageError(f"{_in_use(host, port)}; {way_out}")


def _in_use(host: str, port: int) -> str:
    by = f" by {holder}" if (holder := _holder(port)) else ""
    return f"port {port} on {host} is in use{by}"


def _holder(port: int) -> str | None:
    """Name and pid of the process that listens on ``port``, if this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None

"""Doctors of several hosts meet: each listens on the ports planned for its host, and dials those of the others.

A port is known to be reachable only once something answers there, and nothing of the topology listens yet. So each
doctor answers on them for as long as it runs, to the hosts of the file alone: with one line of JSON about its host and
the time there. Whoever runs it on all hosts at about the same time sees every path; of a host where nobody does, it is
said that nothing is known.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from trtx.doctor.host_facts import HostReport, Met, PortState, WantedHost

_DIAL_S = 1.0
_AGAIN_S = 0.2
_STAYS_S = 5.0
_MOST_BYTES = 1 << 16
_DIALS = 16  # at once


class _Hello(msgspec.Struct):
    """What a doctor sends first: whose it is, and whether it has seen all that it wants to see here."""

    trtx_doctor: str
    is_done: bool = False


class _Answer(msgspec.Struct):
    trtx_doctor: HostReport


@dataclass(slots=True)
class _Heard:
    report: HostReport
    ahead_s: float
    within_s: float


class Listener:
    """Answers on this host's planned ports, in a thread, while the block lasts."""

    def __init__(self, own: WantedHost, others: Sequence[WantedHost], report: Callable[[], HostReport]) -> None:
        """``report`` is asked for each answer. A port that can't be bound is left out: the report says so."""
        self.done: set[str] = set()  # hosts whose doctors need no more answers of this one
        self._own = own
        self._known = {host.address for host in others}
        self._report = report
        self._selector = selectors.DefaultSelector()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doctor-listener", daemon=True)
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Listener:
        for port in self._own.ports.all:
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((self._own.address, port))
                listening.listen()
            except OSError:
                listening.close()
                continue
            self._sockets.append(listening)
            self._selector.register(listening, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()
        self._selector.close()
        for listening in self._sockets:
            listening.close()

    def _run(self) -> None:
        while not self._is_ended.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                with contextlib.suppress(OSError, ValueError):
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)

    def _answer(self, listening: socket.socket) -> None:
        connection, (address, *_) = listening.accept()
        with connection:
            if address not in self._known:
                return
            connection.settimeout(_DIAL_S)
            hello = msgspec.json.decode(_line(connection), type=_Hello)
            connection.sendall(msgspec.json.encode(_Answer(self._report())) + b"\n")
            if hello.is_done:
                self.done.add(hello.trtx_doctor)


def meet(own: WantedHost, others: Sequence[WantedHost], listener: Listener, *, wait_s: float) -> dict[str, Met]:
    """Dials every planned port of ``others`` until a doctor has answered on each host or ``wait_s`` have passed, and
    stays for those that answered until they are done too, for a few seconds more at most."""
    deadline = time.monotonic() + wait_s
    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        waiting = {host.name: pool.submit(_meet_one, own, host, deadline) for host in others}
        met = {name: one.result() for name, one in waiting.items()}
    expected = {name for name, one in met.items() if one.report is not None}
    stays_until = max(deadline, time.monotonic() + _STAYS_S)
    while expected - listener.done and time.monotonic() < stays_until:
        time.sleep(0.02)
    return met


def _meet_one(own: WantedHost, host: WantedHost, deadline: float) -> Met:
    """Asks one port after the other until a doctor answers, then each."""
    heard = None
    while heard is None:
        for port in host.ports.all:
            state, heard = _dial(own, host.address, port)
            if heard is not None or (state == "silent" and time.monotonic() >= deadline):
                break
        if heard is None and time.monotonic() >= deadline:
            break
        if heard is None:
            time.sleep(_AGAIN_S)
    with ThreadPoolExecutor(max_workers=_DIALS) as pool:
        dialled = list(pool.map(lambda port: _dial(own, host.address, port), host.ports.all))
    states: dict[int, PortState] = {port: state for port, (state, _) in zip(host.ports.all, dialled, strict=True)}
    found = [one for _, one in dialled if one is not None and one.report.host == host.name]
    if not found:
        return Met(states)
    _dial(own, host.address, next(port for port, state in states.items() if state == "answered"), is_done=True)
    best = min(found, key=lambda one: one.within_s)
    return Met(states, best.report, best.ahead_s, best.within_s)


def _dial(own: WantedHost, address: str, port: int, *, is_done: bool = False) -> tuple[PortState, _Heard | None]:
    try:
        # From the planned address: a doctor answers nobody else.
        connection = socket.create_connection((address, port), timeout=_DIAL_S, source_address=(own.address, 0))
    except ConnectionRefusedError:
        return "refused", None
    except OSError:
        return "silent", None
    with connection:
        try:
            connection.settimeout(_DIAL_S)
            began, sent = time.monotonic(), time.time()
            connection.sendall(msgspec.json.encode(_Hello(own.name, is_done)) + b"\n")
            report = msgspec.json.decode(_line(connection), type=_Answer).trtx_doctor
        except (OSError, ValueError):
            return "other", None
        took = time.monotonic() - began
    return "answered", _Heard(report, report.time_s - (sent + took / 2), took / 2)


def _line(connection: socket.socket) -> bytes:
    """Up to its end, within the connection's time for each piece. Raises OSError, ValueError."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := connection.recv(4096)) or len(line) > _MOST_BYTES:
            raise ValueError("no line of a doctor")
        line += piece
    return bytes(line)

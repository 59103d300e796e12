"""Connects the doctors of several hosts: each listens on its host's planned ports and dials those of the others.

A port is proved reachable only if something answers on it, and before a topology starts none of its processes listens.
Therefore each doctor answers on the planned ports while it runs, only to hosts in the hosts file, with one line of JSON
about its host and its clock. If the doctor runs on all hosts at about the same time, every path is checked; a host
without a running doctor is reported as unknown.
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
_DIALS = 16  # concurrent dials


class _Hello(msgspec.Struct):
    """A doctor's first message: its host's name, and whether it needs no more answers from the receiver."""

    trtx_doctor: str
    is_done: bool = False


class _Answer(msgspec.Struct):
    trtx_doctor: HostReport


@dataclass(slots=True)
class _Heard:
    report: HostReport
    ahead_s: float
    within_s: float


class PortListener:
    """A context manager that answers on this host's planned ports, in a thread."""

    def __init__(self, own: WantedHost, others: Sequence[WantedHost], report: Callable[[], HostReport]) -> None:
        """``report`` is called for each answer. A port that can't be bound is skipped and listed in the report."""
        self.done: set[str] = set()  # hosts whose doctors need no more answers from this one
        self._own = own
        self._known = {host.address for host in others}
        self._report = report
        self._selector = selectors.DefaultSelector()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doctor-listener", daemon=True)
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> PortListener:
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


def meet(own: WantedHost, others: Sequence[WantedHost], listener: PortListener, *, wait_s: float) -> dict[str, Met]:
    """Dials every planned port of ``others`` until a doctor has answered on each host or ``wait_s`` have passed.

    Then it waits until the doctors that answered are done too, for at most a few seconds more. Returns the result for
    each host by name.
    """
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
    """Dials the ports of ``host`` one by one until a doctor answers, and then dials each of them."""
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
        # Dial from the planned address: a doctor answers only the addresses in the hosts file.
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
    """Reads one line; the connection's timeout applies to each piece. Raises OSError, ValueError."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (piece := connection.recv(4096)) or len(line) > _MOST_BYTES:
            raise ValueError("the other side sent no complete line of JSON")
        line += piece
    return bytes(line)


# The first use of these types happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(_Hello)
msgspec.json.Decoder(_Answer)

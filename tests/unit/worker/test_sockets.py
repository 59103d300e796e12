"""Which streams pay for a look at the worker's sockets, and that none is left out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from trtx.worker import sockets
from trtx.worker.sockets import NoDelay


class Connections:
    """Of a worker to a frontend, one for each stream."""

    def __init__(self, open_sockets: ExitStack) -> None:
        self._open = open_sockets
        self._listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0)))

    def connect(self) -> socket.socket:
        connected = self._open.enter_context(socket.create_connection(self._listener.getsockname()))
        self._open.enter_context(self._listener.accept()[0])
        return connected


@pytest.fixture
def connections() -> Iterator[Connections]:
    with ExitStack() as open_sockets:
        yield Connections(open_sockets)


def has_no_delay(connected: socket.socket) -> bool:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_streams_that_begin_together_share_one_look(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    look = sockets.set_nodelay_everywhere
    monkeypatch.setattr(sockets, "set_nodelay_everywhere", lambda: (looks.append(None), look()))
    streams = [(connections.connect(), time.monotonic_ns()) for _ in range(3)]
    no_delay = NoDelay()
    for connected, asked_ns in streams:
        no_delay.cover(asked_ns)
        assert has_no_delay(connected)
    assert len(looks) == 1


def test_a_stream_that_was_asked_for_after_a_look_has_one_of_its_own(connections: Connections) -> None:
    no_delay = NoDelay()
    no_delay.cover(time.monotonic_ns())
    connected = connections.connect()
    assert not has_no_delay(connected)
    no_delay.cover(time.monotonic_ns())
    assert has_no_delay(connected)

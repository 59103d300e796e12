"""The event broker carries what publishers send to every subscriber, and binds loopback only."""

from __future__ import annotations

import socket
import time

import pytest
import zmq

from trtx.errors import UsageError
from trtx.frontend.broker import Broker


def free_address() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{held.getsockname()[1]}"


def test_what_a_publisher_sends_reaches_a_subscriber() -> None:
    xsub, xpub = free_address(), free_address()
    broker = Broker(xsub, xpub)
    broker.start()
    context = zmq.Context()
    try:
        publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
        publisher.connect(xsub)
        subscriber.connect(xpub)
        subscriber.subscribe(b"kv")
        deadline = time.monotonic() + 10
        while not subscriber.poll(20):  # a subscription needs a moment to travel to the publisher
            assert time.monotonic() < deadline
            publisher.send(b"kv event")
        assert subscriber.recv() == b"kv event"
    finally:
        context.destroy(linger=0)
        broker.close()


def test_a_closed_broker_frees_its_ports() -> None:
    xsub, xpub = free_address(), free_address()
    for _ in range(2):
        broker = Broker(xsub, xpub)
        broker.start()
        broker.close()


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5557", "tcp://192.0.2.7:5557", "ipc:///tmp/x", "tcp://127.0.0.1", "5557"]
)
def test_an_address_beyond_loopback_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="loopback"):
        Broker(address, free_address())


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=taken):
            Broker(taken, free_address())

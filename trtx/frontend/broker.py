"""The event plane's local broker: publishers connect to its XSUB side, subscribers to its XPUB side.

Without a broker, each worker of Dynamo 1.6.1 binds a ZMQ publisher on every interface and sends prompt token ids
through it unencrypted. With ``DYN_ZMQ_BROKER_URL``, both sides connect to the broker, and only the broker listens.
"""

from __future__ import annotations

import ipaddress
import threading
from urllib.parse import urlsplit

import zmq

from trtx.errors import UsageError


def check_loopback(flag: str, address: str) -> None:
    """Raises UsageError unless ``address`` is ``tcp://<a loopback address>:<port>``."""
    parts = urlsplit(address)
    try:
        loopback = parts.scheme == "tcp" and parts.port is not None and ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        loopback = False
    if not loopback or not loopback.is_loopback:
        raise UsageError(
            f"{flag} is {address!r}, expected a loopback address such as tcp://127.0.0.1:5557, because the event plane "
            "carries prompt token ids"
        )


class Broker:
    """An XSUB/XPUB proxy in a daemon thread, which runs until its process ends or :meth:`close` is called."""

    def __init__(self, xsub: str, xpub: str) -> None:
        check_loopback("--broker-xsub", xsub)
        check_loopback("--broker-xpub", xpub)
        self._context = zmq.Context()
        self._frontend = self._bind(zmq.XSUB, "--broker-xsub", xsub)
        self._backend = self._bind(zmq.XPUB, "--broker-xpub", xpub)
        self._thread = threading.Thread(target=self._run, name="event-broker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops a started proxy and frees both ports."""
        self._context.term()  # returns after the proxy's thread has closed both sockets

    def _bind(self, kind: int, flag: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # No high-water mark: after a dropped KV event, the router's index of a worker is wrong until that restarts.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(f"{flag} {address} can't be bound ({error}); give a free address") from error
        return socket

    def _run(self) -> None:
        try:
            zmq.proxy(self._frontend, self._backend)
        except zmq.ContextTerminated:
            pass  # close() was called
        finally:
            self._frontend.close(linger=0)
            self._backend.close(linger=0)

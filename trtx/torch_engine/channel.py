"""A message channel over a socketpair: each frame is a 4-byte little-endian length followed by msgpack.

The same class serves both ends and both directions.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

_LENGTH = struct.Struct("<I")
_READ_SIZE = 1 << 18


class Channel(Generic[Received]):
    """One end of the channel. Any thread may send; only one thread may receive.

    ``accepts`` is the union of the message types that the other end sends.
    """

    def __init__(self, end: socket.socket, accepts: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._send_lock = Lock()
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Sends one message; blocks while the socket's buffer is full. Raises OSError if the other end has closed."""
        with self._send_lock:
            frame = bytearray(_LENGTH.size)
            self._encoder.encode_into(message, frame, _LENGTH.size)
            _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
            self._socket.sendall(frame)

    def receive(self) -> Received | None:
        """Returns the next message, or None at end of file. Raises msgspec.ValidationError for an unknown message."""
        buffer = self._buffer
        while True:
            if len(buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
                if len(buffer) >= end:
                    message: Received = self._decoder.decode(memoryview(buffer)[_LENGTH.size : end].tobytes())
                    del buffer[:end]
                    return message
            try:
                chunk = self._socket.recv(_READ_SIZE)
            except OSError:
                return None
            if not chunk:
                return None
            buffer += chunk

    def close(self) -> None:
        """Shuts down both directions; a ``receive`` in another thread then returns None."""
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

"""Whole messages over a socketpair: a 4-byte little-endian length, then msgpack. Both ends, either direction."""

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
    """Any thread may send, one thread receives. ``accepts``: the union of message types that the other end sends."""

    def __init__(self, end: socket.socket, accepts: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._send_lock = Lock()
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Blocks while the socket's buffer is full. Raises OSError when the other end is gone."""
        with self._send_lock:
            frame = bytearray(_LENGTH.size)
            self._encoder.encode_into(message, frame, _LENGTH.size)
            _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
            self._socket.sendall(frame)

    def receive(self) -> Received | None:
        """The next message, None at end of file. Raises msgspec.ValidationError for what is no known message."""
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
        """Ends both directions; a ``receive`` in another thread returns None."""
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

"""Frames of bytes over the socket between rank 0 and another rank: a 4-byte length, then the frame."""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.torch_engine.handoff.codec import DirectOffer
    from trtx.torch_engine.runner import RunnerArgs

_LENGTH = struct.Struct("<I")
PART_READ = struct.pack("=i", -1)
"""The beginning of a frame that asks a rank to read KV. A plan begins with its number of sequences."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first frame to a rank, pickled."""

    args: RunnerArgs
    rank: int
    size: int
    meeting: str  # the file in which the ranks meet
    hands_off: bool = False  # KV moves between the rank's pool and those of other engines


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank can follow plans."""

    offer: DirectOffer | None = None  # how other engines read its pool, if it hands off KV


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The last frame of a rank that ends."""

    text: str
    is_usage: bool


class Pipe:
    """One end of the socket. Several threads may send at a time; one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Raises OSError if the other end has closed."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes | None:
        """Returns the next frame, or None at end of file."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def _read(self, count: int) -> bytes | None:
        found = bytearray(count)
        view = memoryview(found)
        while view:
            try:
                size = self._socket.recv_into(view)
            except OSError:
                return None
            if not size:
                return None
            view = view[size:]
        return bytes(found)

    def waits(self, timeout_ms: int) -> bool:
        """Waits until :meth:`receive` would not block; returns False if the time is over."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Shuts down both directions; a :meth:`receive` in another thread then returns None."""
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

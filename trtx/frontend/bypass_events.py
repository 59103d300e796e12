"""Removes from a stream the event with which Dynamo's router marks a prompt that it left to a decode worker.

Dynamo 1.6.1 begins each such stream with an event that has a name and no data. Clients that read JSON from every event,
as OpenAI's do, fail at it. Remove this once the router sends the event only to those who ask for it.
"""

from __future__ import annotations

EVENT = b"event: x-bypass-remote-prefill\n: true\n\n"
CHUNK = b"%X\r\n%b\r\n" % (len(EVENT), EVENT)
"""The event as the HTTP chunk that Dynamo makes of it. No token has these bytes, because JSON escapes line feeds."""


class WithoutBypassEvents:
    """Removes :data:`CHUNK` from the bytes of an answer. It may arrive in parts, and more than once.

    For example, a request that migrates gets a second one in the middle of its stream.
    """

    def __init__(self) -> None:
        self._held = b""  # bytes that may be the beginning of the chunk

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the answer. Returns those that may be sent now, which can include earlier ones."""
        data = (self._held + data).replace(CHUNK, b"")
        sizes = range(min(len(CHUNK) - 1, len(data)), 0, -1)
        passed = len(data) - next((size for size in sizes if CHUNK.startswith(data[-size:])), 0)
        self._held = data[passed:]
        return data[:passed]

    def end(self) -> bytes:
        """Returns the bytes that are still held at the end of the answer."""
        held, self._held = self._held, b""
        return held

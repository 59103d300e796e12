"""Finds the end of an HTTP/1.1 answer in the bytes of a connection, and its head and body if they are wanted."""

from __future__ import annotations

from typing import Literal

_NO_BODY = (204, 304)


class AnswerFraming:
    """Follows the answer to one request of ``method``.

    ``keeps``: stores the lines of the answer's head in ``head``, and the body received so far in ``body``.
    """

    def __init__(self, method: bytes, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self.head: list[bytes] = []
        self.body = bytearray()
        self._may_have_body = method != b"HEAD"
        self._expected: Literal["status", "headers", "chunk size", "trailer", "close"] = "status"
        self._line = b""  # the part of a line that has arrived
        self._left = 0  # body bytes before the next line or the end
        self._status = 0
        self._has_head = False
        self._length: int | None = None
        self._is_chunked = False

    def feed(self, data: bytes) -> bool:
        """Takes the next bytes. Returns whether the answer ends with them.

        An answer without a length ends with its connection, so the result is always False then. Raises ValueError for
        bytes that are not HTTP.
        """
        data, self._line = self._line + data, b""
        while data and self._expected != "close":
            if self._left:
                if self._keeps:
                    self.body += data[: max(0, self._left - 2) if self._is_chunked else self._left]
                self._left, data = max(0, self._left - len(data)), data[self._left :]
                if not self._left and not self._is_chunked:
                    return True
                continue
            line, end, data = data.partition(b"\r\n")
            if not end:
                self._line = line
                break
            if self._ends_with(line):
                return True
        return False

    @property
    def status(self) -> int | None:
        """The status of the final answer, once its head has arrived."""
        return self._status if self._has_head else None

    @property
    def is_between_chunks(self) -> bool:
        """Whether the body received so far ends with a whole chunk that is not the last one."""
        return self._expected == "chunk size" and not self._left and not self._line

    def _ends_with(self, line: bytes) -> bool:
        if self._keeps and line and self._expected in ("status", "headers"):
            self.head.append(line)
        if self._expected == "chunk size":
            size = int(line.partition(b";")[0], 16)
            self._left = size + 2 if size else 0  # a line break follows the data
            self._expected = "chunk size" if size else "trailer"
        elif self._expected == "trailer":
            return not line
        elif self._expected == "status":
            self._status = int(line.partition(b" ")[2][:3])
            self._expected = "headers"
        elif line:
            name, _, value = line.lower().partition(b":")
            if name == b"content-length":
                self._length = int(value)
            elif name == b"transfer-encoding":
                self._is_chunked = b"chunked" in value
        else:
            return self._ends_with_head()
        return False

    def _ends_with_head(self) -> bool:
        if self._status < 200:
            self._expected = "status"  # an interim answer; the final one follows
            self.head.clear()
            return False
        self._has_head = True
        if not self._may_have_body or self._status in _NO_BODY:
            return True
        if self._is_chunked:
            self._expected = "chunk size"
        elif self._length is None:
            self._expected = "close"
        else:
            self._left = self._length
        return self._length == 0 and not self._is_chunked

"""Consoles for results and for progress, which handle readers that exit or stop reading, and full disks."""

from __future__ import annotations

import io
import os
import select
import sys
import time
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console

from trtx.cli.sentences import wrapped
from trtx.cli.streams import redirect_to_nowhere

_PATIENCE_S = 1.0
_AT_ONCE = select.PIPE_BUF  # the number of bytes that a writable pipe accepts without blocking


class _PlainConsole(Console):
    """A console that prints text literally, without Rich's markup (``[red]``, ``:100:``), and never crops a table."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        super().print(*objects, crop=crop, **options)


class ResultConsole(_PlainConsole):
    """A console for results on stdout. A failed write raises, so that a lost result is noticed."""


class ProgressConsole(_PlainConsole):
    """A console for progress. It never raises and never blocks for long, so that output can't stop a served topology.

    Lines that can't be written are dropped. Once writing works again, the stream prints how many were dropped, and why.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        # None: the descriptor was closed before Python started (`trtx serve >&-`).
        file = None if stream is None else cast(IO[str], LastingStream(stream))
        super().__init__(file=file, stderr=stderr, soft_wrap=soft_wrap)

    @property
    def can_redraw(self) -> bool:
        """Whether the terminal can move its cursor; on others (TERM=dumb), Rich 14.1 would print empty lines."""
        return self.is_terminal and not self.is_dumb_terminal


def warn(warnings: Iterable[str]) -> None:
    """Prints warnings to stderr, one sentence each. A failed write does not stop the start."""
    console = ProgressConsole(stderr=True, soft_wrap=True)
    for warning in warnings:
        console.print(wrapped(f"trtx: warning: {warning}"))


class LastingStream(io.TextIOBase):
    """Writes unbuffered to the descriptor of ``stream``, and counts failed writes instead of raising.

    After a full disk or a reader that does not read, it tries again. If the reader has exited, it stops writing.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._lost = 0
        self._why = ""
        self._is_cut = False  # the last line was written only in part

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute; Rich asks it what it may draw
        return self._encoding

    @property
    def lost(self) -> int:
        """The number of dropped writes since the last successful one."""
        return self._lost

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._write(text)
        return len(text)

    def _write(self, text: str) -> None:
        if self._lost:
            were = "1 message was" if self._lost == 1 else f"{self._lost} messages were"
            text = "\n" * self._is_cut + f"trtx: {were} left out here: {self._why}\n{text}"
        # A character that the locale can't encode is escaped: an odd line of a log must not end the watch.
        data = text.encode(self._encoding, errors="backslashreplace")
        left = self._send(data)
        if left:
            self._lost += 1
            self._is_cut = self._is_cut or len(left) < len(data)
        else:
            self._lost, self._is_cut = 0, False

    def _send(self, data: bytes) -> bytes:
        """Writes ``data`` and returns the part that could not be written in time, usually b"".

        After a failed write, it does not wait until writing works again.
        """
        descriptor, poll = self.fileno(), select.poll()
        poll.register(descriptor, select.POLLOUT)
        deadline = time.monotonic() + (0.0 if self._lost else _PATIENCE_S)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._why = "their reader did not read them"
                return data
            try:
                data = data[os.write(descriptor, data[:_AT_ONCE]) :]
            except BrokenPipeError:
                redirect_to_nowhere(descriptor)  # otherwise the interpreter's flush at exit would fail, too
                return b""
            except OSError as error:
                self._why = os.strerror(error.errno or 0)
                return data
        return data

"""Where the verbs show what goes on: a console whose reader may go away, fall asleep, or run out of disk."""

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
_AT_ONCE = select.PIPE_BUF  # a pipe that is writable takes this much without blocking


class _PlainConsole(Console):
    """Shows names as they are, whatever they mean in Rich's markup (``[red]``, ``:100:``), and whole tables."""

    def __init__(self, **said: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **said)

    def print(self, *objects: Any, crop: bool = False, **said: Any) -> None:
        super().print(*objects, crop=crop, **said)


class ResultConsole(_PlainConsole):
    """For results, on standard output: whoever can't be given one must know."""


class ProgressConsole(_PlainConsole):
    """Never raises and never blocks for long: a topology that is watched must not end, or wait, over a line about it.

    A line that can't be written is left out. Once writing works again, the stream says how many were, and why.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        # None: the descriptor was closed before Python began (`trtx serve >&-`).
        file = None if stream is None else cast(IO[str], LastingStream(stream))
        super().__init__(file=file, stderr=stderr, soft_wrap=soft_wrap)

    @property
    def can_redraw(self) -> bool:
        """Whether it is a terminal that moves its cursor. Rich 14.1 prints empty lines where one can't (TERM=dumb)."""
        return self.is_terminal and not self.is_dumb_terminal


def warn(warnings: Iterable[str]) -> None:
    """On standard error, a sentence each: what is started goes on, whoever reads them."""
    console = ProgressConsole(stderr=True, soft_wrap=True)
    for warning in warnings:
        console.print(wrapped(f"trtx: warning: {warning}"))


class LastingStream(io.TextIOBase):
    """Writes to the descriptor of ``stream``, unbuffered, and counts what it could not write instead of raising.

    A full disk or a reader that does not read may be over later. A reader that is gone is gone: it is written to no
    more.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._lost = 0
        self._why = ""
        self._is_cut = False  # the last line that was written lacks its end

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute; Rich asks it what it may draw
        return self._encoding

    @property
    def lost(self) -> int:
        """How many writes were left out since the last that worked."""
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
        # Whatever a log's last lines hold is shown somehow: a locale without a letter must not end a watch either.
        data = text.encode(self._encoding, errors="backslashreplace")
        left = self._send(data)
        if left:
            self._lost += 1
            self._is_cut = self._is_cut or len(left) < len(data)
        else:
            self._lost, self._is_cut = 0, False

    def _send(self, data: bytes) -> bytes:
        """Returns what could not be written in time: nothing, as a rule. After a failure nothing is waited for."""
        descriptor, poll = self.fileno(), select.poll()
        poll.register(descriptor, select.POLLOUT)
        deadline = time.monotonic() + (0.0 if self._lost else _PATIENCE_S)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._why = "nobody read them"
                return data
            try:
                data = data[os.write(descriptor, data[:_AT_ONCE]) :]
            except BrokenPipeError:
                redirect_to_nowhere(descriptor)  # or the interpreter fails once more when it flushes at its end
                return b""
            except OSError as error:
                self._why = os.strerror(error.errno or 0)
                return data
        return data

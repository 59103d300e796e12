"""The log of one process since its start: its last lines, or why there are none."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

_TAIL_LINES = 12
_TAIL_BYTES = 16_384
_READ_BYTES = 1 << 20


class Log:
    """Reads what is appended to ``path`` from now on. The file stays open, so its content survives its removal.

    If the log can't be opened, it appears empty, and :meth:`last_words` gives the reason; the process starts anyway.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problem = ""
        self._read_up_to = 0
        self._left = b""
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._problem = os.strerror(error.errno or 0)
            self._descriptor = os.open(os.devnull, os.O_RDWR)
        weakref.finalize(self, os.close, self._descriptor)
        self._start = self._read_up_to = os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        """The descriptor for the process that writes the log."""
        return self._descriptor

    def tail(self) -> str:
        """The last lines since the start, read from the end, because a log may be large."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            first = max(self._start, size - _TAIL_BYTES)
            return "\n".join(_text(os.pread(self._descriptor, size - first, first)).splitlines()[-_TAIL_LINES:])
        return ""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call."""
        with contextlib.suppress(OSError):
            data = os.pread(self._descriptor, _READ_BYTES, self._read_up_to)
            self._read_up_to += len(data)
            whole, _, self._left = (self._left + data).rpartition(b"\n")
            return _text(whole).splitlines()
        return []

    def last_words(self, exit_text: str) -> str:
        """The last lines, or why there are none.

        Writes ``exit_text`` to the log to find out whether it is writable: on a full disk, a log is empty or
        incomplete, whatever its process wrote.
        """
        tail, lost = self.tail(), self._problem or self._note(exit_text)
        where = f"log: {self._path}" + (" (removed while it ran)" if self._is_gone() else "")
        if lost:
            where += f", which can't be written ({lost}), so its last output is lost"
        if tail:
            return f"{where}; {'the last lines in it' if lost else 'its last lines'}:\n{tail}"
        return where if lost else f"{where}; it is empty"

    def _note(self, exit_text: str) -> str:
        """Appends a line. Returns the error if that fails, else ""."""
        try:
            os.write(self._descriptor, f"trtx: {exit_text}\n".encode())
        except OSError as error:
            return os.strerror(error.errno or 0)
        return ""

    def _is_gone(self) -> bool:
        """Whether the file is known to have been removed. A log that could not be opened does not count as removed."""
        try:
            return not self._problem and not os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False


def _text(data: bytes) -> str:
    return data.decode(errors="replace")

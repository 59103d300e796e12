"""JSON-lines documents, such as ``samples.jsonl``. A partial last line, from an interrupted write, is dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from trtx.bench.documents import RESTORE, DocumentKind, parsed, plain
from trtx.bench.files import write_text
from trtx.errors import UsageError

T = TypeVar("T")


def read_lines(directory: Path, document: DocumentKind, form: type[T]) -> tuple[T, ...]:
    """The entries in file order; empty if there is no file yet. A partial last line is ignored.

    Raises UsageError that names the line and the field that can't be read.
    """
    path = directory / document.file
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    return tuple(
        _read(line, document, form, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1) if line
    )


def _read(line: str, document: DocumentKind, form: type[T], source: str) -> T:
    try:
        fields = parsed(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error}); {RESTORE}") from error
    return document.restored(document.checked(fields, source), form, source)


class LineWriter:
    """Appends to one file. A line survives the end of this process as soon as :meth:`add` has returned."""

    def __init__(self, directory: Path, document: DocumentKind) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._document = document
        self._path = directory / document.file
        self._mend()

    def add(self, content: Any) -> None:
        """Appends one line. ``content``: a dataclass of the document's form."""
        data = self._line(content).encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, data[written:])
        finally:
            os.close(descriptor)

    def replace(self, contents: Iterable[Any]) -> None:
        """Replaces the whole file atomically."""
        write_text(self._path, "".join(map(self._line, contents)))

    def _line(self, content: Any) -> str:
        return json.dumps(self._document.versioned(plain(content)), ensure_ascii=False, allow_nan=False) + "\n"

    def _mend(self) -> None:
        """Removes a partial last line, so that the next one starts a new line."""
        if self._path.exists() and not (text := self._path.read_bytes()).endswith(b"\n"):
            os.truncate(self._path, text.rfind(b"\n") + 1)

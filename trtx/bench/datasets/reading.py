"""Reads a file of records: JSON lines, a JSON array, or plain text; optionally with gzip or a byte order mark."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, cast

from trtx.config.wording import quoted
from trtx.errors import UsageError

EXAMPLE = '{"text": "…"}'
_GZIP, _MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
_OTHERS = {
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ": "compressed with xz",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``where``: its place, such as ``line 3``. ``value``: the parsed JSON, or the line of plain text."""

    where: str
    value: Any


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records. ``is_text``: plain text, one prompt per line. ``is_lines``: aiperf can read the file as is."""

    path: Path
    is_text: bool
    is_array: bool
    is_lines: bool

    def __iter__(self) -> Iterator[Record]:
        return _array(self) if self.is_array else _lines(self)

    def refuse(self, where: str, problem: str) -> NoReturn:
        raise UsageError(f"input_file {quoted(str(self.path))}{f', {where}' if where else ''}: {problem}")


def open_records(path: Path) -> RecordFile:
    """Determines the file's format from its beginning. Raises UsageError if it can't contain records."""
    probe = RecordFile(path, is_text=False, is_array=False, is_lines=False)
    with _opened(probe) as file:
        head = file.read(8)
        for magic, name in _OTHERS.items():
            if head.startswith(magic):
                probe.refuse("", f"it is {name}; expected UTF-8 text with one JSON object per line")
        file.seek(len(_MARK) if head.startswith(_MARK) else 0)
        first = next((line.strip() for line in file if line.strip()), None)
    if first is None:
        probe.refuse("", f"it has no record; expected one JSON object per line, such as {EXAMPLE}")
    is_array = first.startswith(b"[")
    is_text = not is_array and not first.startswith(b"{") and path.name.removesuffix(".gz").endswith(".txt")
    with path.open("rb") as raw:
        is_compressed = raw.read(2) == _GZIP
    is_lines = not (is_compressed or is_array or is_text or head.startswith(_MARK))
    return RecordFile(path, is_text, is_array, is_lines)


def count_records(path: Path) -> int | None:
    """Number of records; 0 for an invalid file, which the check of the records reports; None if it can't be read."""
    try:
        file = open_records(path)
        if file.is_array:
            return sum(1 for _ in file)
        with _opened(file) as lines:
            return sum(not line.isspace() for line in lines)
    except OSError:
        return None
    except UsageError:
        return 0


def names_delays(path: Path) -> bool:
    """Whether the text of a file names the field ``delay``; False if it can't be read.

    A file that names it without a delay is only measured more carefully: as a load without a constant concurrency.
    """
    try:
        with _opened(RecordFile(path, is_text=False, is_array=False, is_lines=False)) as lines:
            return any(b'"delay"' in line for line in lines)
    except (OSError, UsageError):
        return False


@contextlib.contextmanager
def _opened(source: RecordFile) -> Iterator[BufferedReader]:
    """Opens the file, and decompresses gzip whatever the file's name is. Raises UsageError for damaged gzip data."""
    with source.path.open("rb") as file:
        is_compressed = file.read(2) == _GZIP
        file.seek(0)
        try:
            yield cast(BufferedReader, gzip.GzipFile(fileobj=file)) if is_compressed else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            source.refuse("", f"it can't be decompressed ({error}); compress it again")


def _lines(source: RecordFile) -> Iterator[Record]:
    with _opened(source) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_MARK) if number == 1 else line
            if not line.strip():
                continue
            where = f"line {number}"
            text = _decoded(source, where, line).strip()
            yield Record(where, text if source.is_text else _parsed(source, where, text))


def _array(source: RecordFile) -> Iterator[Record]:
    with _opened(source) as file:
        text = _decoded(source, "", file.read().removeprefix(_MARK))
    found = _parsed(source, "", text)
    if not found:
        source.refuse("", f"its array is empty; expected records, such as {EXAMPLE}")
    for number, value in enumerate(found, start=1):
        if not isinstance(value, dict):
            source.refuse(f"record {number}", f"it is not an object; expected one, such as {EXAMPLE}")
        yield Record(f"record {number}", value)


def _decoded(source: RecordFile, where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        source.refuse(where, f"it is not UTF-8 (byte {error.start}: {error.reason}); save the file as UTF-8")


def _parsed(source: RecordFile, where: str, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
        if "\\u" in text:  # may be a lone surrogate, which no server accepts
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        source.refuse(where, f"it is nested too deeply; expected a record such as {EXAMPLE}")
    except UnicodeEncodeError:
        source.refuse(
            where, "it has half a Unicode character (a lone surrogate), which no server accepts; correct the text"
        )
    except _Twice as error:
        source.refuse(where, f"{error}; leave one of them out")
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        if isinstance(error, json.JSONDecodeError) and not where:
            where = f"line {error.lineno}"
        if source.is_array:
            source.refuse(
                where,
                f"it is not a JSON array ({reason}); expected an array of records, or one object per line: {EXAMPLE}",
            )
        if where and not text.startswith("{"):
            source.refuse(
                where,
                f"it is not JSON; expected one object per line, such as {EXAMPLE}, or a file name that ends in .txt "
                "for one prompt per line",
            )
        source.refuse(where, f"it is not JSON ({reason}); expected one complete object per line")
    if where and not isinstance(value, dict):
        source.refuse(where, f"it is not an object; expected one, such as {EXAMPLE}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


class _Twice(Exception):
    """An object has the same field twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"the field {next(name for name in names if names.count(name) > 1)!r:.60} occurs twice")
    return found

"""Standard output and error as trtx finds them: closed, on a full disk, or in order."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from trtx.errors import UsageError


class _Output(io.FileIO):
    """Standard output, whose failure is known for what it is wherever it comes up. A reader gone stays what it was."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError(
                f"standard output can't be written ({os.strerror(error.errno or 0)}); make room there, or send it "
                "elsewhere"
            ) from error


class _Complaints(io.FileIO):
    """Standard error: where it can't be written nobody can be told, and the exit code must stay what it is."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def prepare_streams() -> None:
    """Opens what was closed, and has both streams know what it means that they can't be written.

    Where a descriptor was closed (``trtx serve >&-``), the next file or socket would get its number, and what is meant
    for the terminal would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over(sys.stdout, _Output)
        # A locale without a letter must not lose a result either (LC_ALL=C): it is shown by its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _over(sys.stderr, _Complaints)


def _over(before: io.TextIOWrapper, kind: type[io.FileIO]) -> io.TextIOWrapper:
    raw = kind(before.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def drop_what_is_left(stream: IO[str] | None) -> None:
    """Flushes; what can't be written even now is dropped, or the interpreter would try once more at its own end, and
    make the exit code 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, UsageError):
        redirect_to_nowhere(stream.fileno())


def redirect_to_nowhere(descriptor: int) -> None:
    """What is written to ``descriptor`` from now on is written to nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)

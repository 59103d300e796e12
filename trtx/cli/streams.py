"""Makes stdout and stderr robust against closed descriptors, full disks and readers that exit."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from trtx.errors import UsageError


class _Output(io.FileIO):
    """Raw stdout whose failed writes raise UsageError. If the reader has exited, BrokenPipeError is kept."""

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
    """Raw stderr that ignores failed writes: they can't be reported, and must not change the exit code."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def prepare_streams() -> None:
    """Opens closed descriptors on /dev/null, and replaces both streams by ones that handle failed writes.

    If a standard descriptor is closed (``trtx serve >&-``), the next file or socket would get its number and receive
    the output that is meant for the terminal.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over(sys.stdout, _Output)
        # A character that the locale can't encode (LC_ALL=C) is escaped, so that the result is not lost.
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
    """Flushes the stream, and drops the data that still can't be written.

    Otherwise the interpreter would try again at exit and change the exit code to 120.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, UsageError):
        redirect_to_nowhere(stream.fileno())


def redirect_to_nowhere(descriptor: int) -> None:
    """Redirects ``descriptor`` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)

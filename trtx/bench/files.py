"""Directory names as text, and atomic file writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def name_of(directory: Path) -> str:
    """The name of the resolved directory. Bytes that aren't UTF-8 are replaced."""
    return os.fsencode(directory.resolve().name).decode("utf-8", errors="replace")


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` for text, encoded as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def take_out(secret: str, directory: Path) -> None:
    """Replaces ``secret`` with ``[redacted]`` in every file under ``directory``, each file atomically."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        found = path.read_bytes()
        if secret.encode() in found:
            write_bytes(path, found.replace(secret.encode(), b"[redacted]"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces ``path`` atomically: a reader sees the old content or the new, never a part. A failure leaves no new
    file.

    An OSError carries ``path`` as its filename. Python sets none when a write fails on a full disk, and the handlers
    need it to find the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except BaseException as error:  # also on KeyboardInterrupt
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise

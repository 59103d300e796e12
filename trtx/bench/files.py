"""Names of directories as text, and writing a whole file or none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def name_of(directory: Path) -> str:
    """The name that it has wherever it is called from, as text: bytes of it that are no UTF-8 are replaced."""
    return os.fsencode(directory.resolve().name).decode("utf-8", errors="replace")


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of text, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def take_out(secret: str, directory: Path) -> None:
    """Puts ``[redacted]`` in its place in every file under ``directory``, each at once."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        found = path.read_bytes()
        if secret.encode() in found:
            write_bytes(path, found.replace(secret.encode(), b"[redacted]"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces ``path`` at once: a reader sees the old content or the new, never a part. A failure leaves nothing new.

    An OSError names ``path``: a write on a full disk does not, and who catches it asks whose disk that is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except BaseException as error:  # an interrupt too
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise

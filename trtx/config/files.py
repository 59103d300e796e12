"""Validates and reads paths and files that the user names.

These functions refuse names that no file can have, pipes and devices (a read may never end), and files larger than any
config. Every refusal is one sentence.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from trtx.config.wording import shown
from trtx.errors import UsageError

MAX_BYTES = 256 * 1024
"""The size limit of a config file. The largest known config, with an explicit expert placement, has a third of it."""

_NAME_BYTES, _PATH_BYTES = 255, 4095  # NAME_MAX and PATH_MAX of Linux
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def name_problem(text: str) -> str | None:
    """Returns why ``text`` can be neither a path on this system nor the name of a model on a hub, or None."""
    if not text.strip():
        return "is empty"
    if "\0" in text:
        return "holds a NUL byte"
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:
        return "holds bytes that are no UTF-8"
    if len(encoded) > _PATH_BYTES or any(len(part) > _NAME_BYTES for part in encoded.split(b"/")):
        return f"is {len(text):,} characters long, more than a path can have"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"begins with {text.partition('/')[0]}, and there is no such user"
    return None


def path_problem(path: Path) -> str | None:
    """Returns why ``stat`` fails on ``path``; None if it succeeds or if the path does not exist."""
    if problem := name_problem(str(path)):
        return problem
    try:
        path.expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a loop of symbolic links, or no permission
        return f"can't be looked at ({reason(error)})"
    return None


def open_file(path: Path, what: str, expected: str) -> BinaryIO:
    """Opens a regular file for reading.

    Raises UsageError, whose message begins with ``what`` and ends with ``expected``.
    """
    problem = name_problem(str(path))
    if problem is None:
        try:
            mode = path.stat().st_mode
            problem = next((f"can't be read (it is {kind})" for is_kind, kind in _KINDS if is_kind(mode)), None)
            if problem is None:
                # O_NONBLOCK: if a pipe has replaced the file since the stat, opening it must not block.
                return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        except OSError as error:
            problem = f"can't be read ({reason(error)})"
    raise UsageError(f"{what} {shown(path)} {problem}; expected {expected}")


def read_bytes(path: Path, what: str, expected: str, *, limit: int = MAX_BYTES) -> bytes:
    """Reads a regular file of at most ``limit`` bytes. Raises UsageError as :func:`open_file` does."""
    with open_file(path, what, expected) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise UsageError(f"{what} {shown(path)} can't be read ({reason(error)}); expected {expected}") from error
    if len(content) > limit:
        raise UsageError(f"{what} {shown(path)} is larger than {limit // 1024} KiB; expected {expected}")
    return content


def read_text(path: Path, what: str, expected: str, *, limit: int = MAX_BYTES) -> str:
    """Reads a regular file as :func:`read_bytes` does and decodes it as UTF-8. Raises UsageError."""
    content = read_bytes(path, what, expected, limit=limit)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{what} {shown(path)}, line {line} is not UTF-8; expected {expected}") from error


def reason(error: OSError) -> str:
    """Returns the system's message, such as ``No such file or directory``."""
    return error.strerror or str(error)

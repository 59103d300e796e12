"""Free-space and write-permission check of a directory.

The check writes a file, which covers free blocks, inodes, quotas, read-only file systems and missing directories.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOM_BYTES = 65_536
"""Bytes that must fit. A process's discovery records and logging file take 20 kB, a sweep point with report more."""


def write_problem(directory: Path) -> str | None:
    """The system's error message if :data:`ROOM_BYTES` can't be written to ``directory`` now, else None."""
    probe = directory / f".room.{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * ROOM_BYTES)
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None

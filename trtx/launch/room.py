"""Whether a directory takes what is about to be written into it.

It is tried: no blocks, no inodes, a quota, a file system gone read-only, a directory gone all say no in one place.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOM_BYTES = 65_536
"""Less is no room: a process's discovery records and logging file take 20 kB, a cell with its report takes more."""


def write_problem(directory: Path) -> str | None:
    """Why :data:`ROOM_BYTES` can't be written there now, in the system's words; None where they can."""
    probe = directory / f".room.{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * ROOM_BYTES)
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None

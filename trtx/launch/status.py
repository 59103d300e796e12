"""The status file of a worker that runs now, as its launcher sees it."""

from __future__ import annotations

from pathlib import Path

from trtx.engine.worker_status import WorkerStatus, read


def read_status(path: Path | None, pid: int) -> WorkerStatus | None:
    """The status of process ``pid``; None while it has not written one: an older process's file does not count.

    Raises LaunchError, naming file and field, for a file that is no worker's status.
    """
    try:
        status = read(path) if path is not None else None
    except OSError:
        return None
    return status if status is not None and status.pid == pid else None

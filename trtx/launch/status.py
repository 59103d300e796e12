"""Reads the status file that a worker writes, as docs/architecture.md has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trtx.engine.ranks import Rank


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says about itself."""

    pid: int
    state: str  # loading, serving, draining
    engine_pid: int | None = None
    worker_id: int | None = None
    device_memory_bytes: int = 0
    kv_blocks: int = 0
    load_seconds: float | None = None
    ranks: tuple[Rank, ...] = ()  # processes that its engine started
    error: str | None = None


def read_status(path: Path | None, pid: int) -> WorkerStatus | None:
    """The status of process ``pid``; None while it has not written one: an older process's file does not count."""
    if path is None:
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["ranks"] = tuple(Rank(**rank) for rank in document.get("ranks", ()))
        status = WorkerStatus(**{name: document[name] for name in WorkerStatus.__slots__ if name in document})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return status if status.pid == pid else None

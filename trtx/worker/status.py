"""The status file: how a worker tells the launcher who it is and how far it has come."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtx.engine.ranks import Rank

State = Literal["loading", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class Status:
    """``worker_id`` is the integer instance id; the worker's discovery records end in its hex form."""

    pid: int
    state: State = "loading"
    engine_pid: int | None = None
    worker_id: int | None = None
    device_memory_bytes: int = 0
    kv_blocks: int = 0
    load_seconds: float | None = None
    ranks: tuple[Rank, ...] = ()  # processes of the engine, to end by pid where they outlive this one
    error: str | None = None


class StatusFile:
    """Replaces the file whole at every change: a reader never sees half of one. ``path`` None: no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.status = Status(os.getpid())
        self.update()

    def update(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{self.status.pid}")
        temporary.write_text(json.dumps(asdict(self.status)) + "\n", encoding="utf-8")
        temporary.replace(self._path)

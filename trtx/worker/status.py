"""The status file: how a worker tells the launcher who it is and how far it has come."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtx.engine.ranks import Rank

logger = logging.getLogger(__name__)

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
    """Replaces the file whole at every change: a reader never sees half of one. ``path`` None: no file.

    A worker serves on where the file can't be written (a full disk, a directory that was removed): the log says it
    once, and :meth:`keep` writes it as soon as it can be.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_behind = False
        self.status = Status(os.getpid())
        self.update()

    def update(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        if self._path is not None:
            self._write(self._path)

    def keep(self) -> None:
        """Writes it anew where it is behind, or was removed."""
        if self._path is not None and (self._is_behind or not _is_there(self._path)):
            self._write(self._path)

    def _write(self, path: Path) -> None:
        try:
            self._replace(path)
        except OSError as error:
            if not self._is_behind:
                logger.warning("the status file %s can't be written (%s)", path, error.strerror)
            self._is_behind = True
            with contextlib.suppress(OSError):  # what it says no longer holds
                path.unlink()
        else:
            self._is_behind = False

    def _replace(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{self.status.pid}")
        try:
            temporary.write_text(json.dumps(asdict(self.status)) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _is_there(path: Path) -> bool:
    """``Path.exists`` raises where a directory above it can't be entered."""
    try:
        path.lstat()
    except OSError:
        return False
    return True

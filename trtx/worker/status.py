"""The status file: how a worker tells the launcher who it is and how far it has come."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtx.engine.worker_status import WorkerStatus, to_json

logger = logging.getLogger(__name__)


class StatusFile:
    """Replaces the file whole at every change: a reader never sees half of one. ``path`` None: no file.

    A worker serves on where the file can't be written (a full disk, a directory that was removed): the log says it
    once, and :meth:`keep` writes it as soon as it can be.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_behind = False
        self.status = WorkerStatus(os.getpid())
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
            temporary.write_bytes(to_json(self.status))
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

"""The status file, in which a worker reports its identity and progress to the launcher."""

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
    """Replaces the file atomically at every change, so a reader never sees a partial one. ``path`` None: no file.

    If the file can't be written (full disk, removed directory), the worker keeps serving: it logs this once, and
    :meth:`keep` writes the file as soon as possible.
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
        """Writes the file again if the last write failed or the file was removed."""
        if self._path is not None and (self._is_behind or not _is_there(self._path)):
            self._write(self._path)

    def _write(self, path: Path) -> None:
        try:
            self._replace(path)
        except OSError as error:
            if not self._is_behind:
                logger.warning("the status file %s can't be written (%s)", path, error.strerror)
            self._is_behind = True
            with contextlib.suppress(OSError):  # its content is out of date
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
    """Whether ``path`` exists. ``Path.exists`` would raise if a parent directory can't be entered."""
    try:
        path.lstat()
    except OSError:
        return False
    return True

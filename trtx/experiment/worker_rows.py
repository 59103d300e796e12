"""Reads what the workers of a served topology write about ended requests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from trtx.engine.worker_status import requests_file
from trtx.topology import Plan


def row_files_of(plan: Plan) -> tuple[Path, ...]:
    """The files in which the workers of ``plan`` record ended requests."""
    return tuple(requests_file(one.status_file) for one in plan.workers if one.status_file is not None)


class WorkerRowFiles:
    """Follows the files in which workers record ended requests. A context manager, which closes them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = tuple(_RowFile(path) for path in paths)

    def take(self) -> list[str]:
        """The whole lines written since the last call, file by file. A file that can't be read gives no line.

        Call it often enough that no worker renames its file twice in between: the lines of a whole file would be lost.
        """
        return [line for file in self._files for line in file.new_lines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()


class _RowFile:
    """One file, which its worker renames once it is large (``trtx.worker.requests.stage_log``), and begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None  # stays readable after the renaming
        self._rest = b""  # the beginning of a line whose end is not written yet

    def new_lines(self) -> list[str]:
        try:
            whole, end, self._rest = (self._rest + self._new_bytes()).rpartition(b"\n")
        except OSError:
            return []
        return (whole + end).decode().splitlines()

    def _new_bytes(self) -> bytes:
        if self._file is None:
            self._file = self._path.open("rb")
        found = self._file.read()
        if not self._is_renamed(self._file):
            return found
        found += self._file.read()  # written after the first read and before the renaming
        self.close()
        with contextlib.suppress(OSError):  # the next call opens it
            self._file = self._path.open("rb")
            found += self._file.read()
        return found

    def _is_renamed(self, file: BinaryIO) -> bool:
        """Whether the worker has renamed the open file and begun another one."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except OSError:
            return False  # the new file does not exist yet

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

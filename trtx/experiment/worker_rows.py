"""Reads what the workers of a served topology write about ended requests."""

from __future__ import annotations

from pathlib import Path

from trtx.engine.worker_status import requests_file
from trtx.topology import Plan


class WorkerRowFiles:
    """Reads the files in which a topology's workers record ended requests, each from where the last call stopped."""

    def __init__(self, plan: Plan) -> None:
        self._read = {requests_file(one.status_file): 0 for one in plan.workers if one.status_file is not None}

    def take(self) -> list[str]:
        """The whole lines written since the last call. A file that can't be read gives no line."""
        return [line for path in self._read for line in self._of(path)]

    def _of(self, path: Path) -> list[str]:
        found, begun = b"", self._read[path]
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < begun:  # the worker has begun a new file since
                    found = path.with_name(f"{path.name}.1").read_bytes()[begun:]
                    begun = 0
                file.seek(begun)
                fresh = file.read()
        except OSError:
            return []
        fresh = fresh[: fresh.rfind(b"\n") + 1]
        self._read[path] = begun + len(fresh)
        return (found + fresh).decode().splitlines()

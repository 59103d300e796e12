"""Dynamo's file discovery, as seen from outside: which workers are registered, and how to take a dead one out.

Layout in Dynamo 1.4.2: ``<dir>/v1/{instances,mdc,event_sources}/<percent-encoded key>``, where the key of a worker's
own records ends in its instance id in hex, and an event source's record only names it inside. A dead worker's records
expire after 10 s, and until then requests are sent to it: the launcher, which knows first, deletes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SERVING_ENDPOINT = "generate"


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker that takes requests: its id, and the loopback port of its ``generate`` endpoint.

    A worker has other endpoints too, registered under the same id, some of them long before this one.
    """

    worker_id: int
    port: int


class Registry:
    """One topology's discovery directory. It may not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "v1"

    def instances(self) -> list[Instance]:
        """All workers that are registered now; a record that is being written or removed is left out.

        Raises OSError where that can't be known.
        """
        found = []
        for path in self._files("instances"):
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, AttributeError, IndexError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["endpoint"] != _SERVING_ENDPOINT:
                    continue
                port = int(str(record["transport"]["tcp"]).split("/")[0].rpartition(":")[2])
                found.append(Instance(int(record["instance_id"]), port))
        return found

    def worker_ids(self) -> set[int]:
        """Workers that a frontend can route to: it needs their endpoint and their model card."""
        cards = {path.name.rpartition("%2F")[2] for path in self._files("mdc")}
        return {instance.worker_id for instance in self.instances() if f"{instance.worker_id:x}" in cards}

    def renewed_at(self, worker_id: int) -> float | None:
        """When a worker last renewed its instance records, in s since the epoch: it touches them every 3.3 s, and
        every Dynamo process deletes what was not touched for 10 s (Dynamo 1.4.2). Raises OSError."""
        times = []
        for path in self._files("instances"):
            if _is_named(path, worker_id):
                with contextlib.suppress(FileNotFoundError):
                    times.append(path.stat().st_mtime)
        return max(times, default=None)

    def remove(self, worker_id: int) -> int:
        """Deletes every record of a worker, instances first, as far as the file system lets it; returns how many."""
        count = 0
        with contextlib.suppress(OSError):
            for bucket in ("instances", "mdc"):
                count += _delete(path for path in self._files(bucket) if _is_named(path, worker_id))
            count += _delete(path for path in self._files("") if _is_mentioned(path, worker_id))
        return count

    def owner(self, pid: int, claimed: set[int]) -> int | None:
        """The worker id of process ``pid``, by the port it listens on: for workers that write no status file."""
        unclaimed = [instance for instance in self.instances() if instance.worker_id not in claimed]
        if not unclaimed:
            return None
        ports = listening_ports(pid)
        return next((instance.worker_id for instance in unclaimed if instance.port in ports), None)

    def _files(self, bucket: str) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            if bucket:
                return [path for path in (self._root / bucket).iterdir() if path.is_file()]
            return [path for path in self._root.rglob("*") if path.is_file()]
        return []


def _delete(paths: Iterable[Path]) -> int:
    count = 0
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count


def _is_named(path: Path, worker_id: int) -> bool:
    return path.name.endswith(f"%2F{worker_id:x}")


def _is_mentioned(path: Path, worker_id: int) -> bool:
    try:
        return _mentions(json.loads(path.read_text(encoding="utf-8")), worker_id)
    except (OSError, ValueError):
        return False


def _mentions(document: Any, worker_id: int) -> bool:
    if isinstance(document, dict):
        return any(
            value == worker_id if key in ("worker_id", "instance_id") else _mentions(value, worker_id)
            for key, value in document.items()
        )
    return False


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which process ``pid`` itself listens; none where that can't be seen."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

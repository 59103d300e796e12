"""Dynamo's file discovery, read from outside.

Layout in Dynamo 1.6.1: ``<dir>/v1/{instances,mdc,event_sources}/<percent-encoded key>``. The key of a worker's own
records ends in its instance id in hex; an event source's record contains the id only in its JSON. A dead worker's
records expire after 10 s, and until then requests are routed to it. The launcher learns of the death first and deletes
them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtx.planes.registry import Card, Instance, read_card, read_instance

RECORDS_LIVE_S = 10.0  # Dynamo 1.6.1: any process that sees a record untouched for this long deletes it


class FileRegistry:
    """One topology's discovery directory, which may not exist yet. See :class:`~trtx.planes.registry.Registry`."""

    records_live_s = RECORDS_LIVE_S

    def __init__(self, directory: Path) -> None:
        self._root = directory / "v1"

    def instances(self) -> list[Instance]:
        """All workers that are registered now, without records that are being written or removed.

        Raises OSError if they can't be read.
        """
        found = []
        for path in self._files("instances"):
            with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
                instance = read_instance(json.loads(path.read_text(encoding="utf-8")))
                if instance is not None:
                    found.append(instance)
        return found

    def worker_ids(self) -> set[int]:
        """Workers to which a frontend can route: those with an endpoint and a model card."""
        cards = {path.name.rpartition("%2F")[2] for path in self._files("mdc")}
        return {instance.worker_id for instance in self.instances() if f"{instance.worker_id:x}" in cards}

    def cards(self) -> list[Card]:
        """The model cards, without those that are being written or removed."""
        found = []
        for path in sorted(self._files("mdc")):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                found.append(read_card(json.loads(path.read_text(encoding="utf-8"))))
        return found

    def renewed_at(self, worker_id: int) -> float | None:
        """From the modification times of its instance records, which a worker touches every 3.3 s (Dynamo 1.6.1).

        Every Dynamo process deletes records that were not touched for 10 s.
        """
        times = []
        for path in self._files("instances"):
            if _is_named(path, worker_id):
                with contextlib.suppress(FileNotFoundError):
                    times.append(path.stat().st_mtime)
        return max(times, default=None)

    def remove(self, worker_id: int) -> None:
        """Deletes every record of a worker, instances first, as far as the file system allows."""
        with contextlib.suppress(OSError):
            for bucket in ("instances", "mdc"):
                _delete(path for path in self._files(bucket) if _is_named(path, worker_id))
            _delete(path for path in self._files("") if _is_mentioned(path, worker_id))

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _files(self, bucket: str) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            if bucket:
                return [path for path in (self._root / bucket).iterdir() if path.is_file()]
            return [path for path in self._root.rglob("*") if path.is_file()]
        return []


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


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

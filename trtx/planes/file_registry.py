"""Dynamo's file discovery, as seen from outside.

Layout in Dynamo 1.4.2: ``<dir>/v1/{instances,mdc,event_sources}/<percent-encoded key>``, where the key of a worker's
own records ends in its instance id in hex, and an event source's record only names it inside. A dead worker's records
expire after 10 s, and until then requests are sent to it: the launcher, which knows first, deletes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtx.planes.registry import Card, Instance, read_card, read_instance

RECORDS_LIVE_S = 10.0  # Dynamo 1.4.2: a record that was not touched for so long is deleted by whoever sees it


class FileRegistry:
    """One topology's discovery directory. It may not exist yet. See :class:`~trtx.planes.registry.Registry`."""

    records_live_s = RECORDS_LIVE_S

    def __init__(self, directory: Path) -> None:
        self._root = directory / "v1"

    def instances(self) -> list[Instance]:
        """All workers that are registered now; a record that is being written or removed is left out.

        Raises OSError where that can't be known.
        """
        found = []
        for path in self._files("instances"):
            with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
                instance = read_instance(json.loads(path.read_text(encoding="utf-8")))
                if instance is not None:
                    found.append(instance)
        return found

    def worker_ids(self) -> set[int]:
        """Workers that a frontend can route to: it needs their endpoint and their model card."""
        cards = {path.name.rpartition("%2F")[2] for path in self._files("mdc")}
        return {instance.worker_id for instance in self.instances() if f"{instance.worker_id:x}" in cards}

    def cards(self) -> list[Card]:
        """As they are written; one that is being written or removed is left out."""
        found = []
        for path in sorted(self._files("mdc")):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                found.append(read_card(json.loads(path.read_text(encoding="utf-8"))))
        return found

    def renewed_at(self, worker_id: int) -> float | None:
        """It touches its instance records every 3.3 s, and every Dynamo process deletes what was not touched for 10 s
        (Dynamo 1.4.2)."""
        times = []
        for path in self._files("instances"):
            if _is_named(path, worker_id):
                with contextlib.suppress(FileNotFoundError):
                    times.append(path.stat().st_mtime)
        return max(times, default=None)

    def remove(self, worker_id: int) -> None:
        """Deletes every record of a worker, instances first, as far as the file system lets it."""
        with contextlib.suppress(OSError):
            for bucket in ("instances", "mdc"):
                _delete(path for path in self._files(bucket) if _is_named(path, worker_id))
            _delete(path for path in self._files("") if _is_mentioned(path, worker_id))

    def close(self) -> None:
        """Holds nothing."""

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

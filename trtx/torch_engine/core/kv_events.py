"""KV cache events in TensorRT-LLM's format: they tell a KV-aware router what this engine's prefix cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from trtx.torch_engine.core.retention import DEFAULT_PRIORITY

DEVICE, HOST = 0, 1
"""Cache levels of events."""


def event_hash(name: bytes) -> int:
    """A block's hash for routers: 64 bits of its name, unsigned.

    Routers use it as a hint, so a rare collision does no harm.
    """
    return int.from_bytes(name[:8], "little")


class KvEventLog:
    """Numbers events from 0 and keeps the latest ``max_size`` until ``take``; a gap in the ids means lost events.

    The first event is ``created``. A reader that sees it, or an id that restarts at 0, knows that the engine restarted.
    """

    def __init__(self, max_size: int, *, num_blocks: int, window_size: int, num_host_blocks: int = 0) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._window_size = window_size
        self._next_id = 0
        self.is_below: Callable[[bytes], bool] | None = None  # whether the host tier holds a content
        self._below: set[bytes] = set()  # reported contents that only the host tier holds
        self._add({"type": "created", "num_blocks_per_cache_level": [num_blocks, num_host_blocks]})

    def stored(
        self, parent: bytes | None, blocks: Iterable[tuple[bytes, Sequence[int]]], cache_salt: str | None = None
    ) -> None:
        """Records stored blocks.

        ``blocks``: (name, tokens) of consecutive blocks. The first one's parent is ``parent``; None means the root.
        ``cache_salt``: of their sequence. Without it a router would take the blocks for those of unsalted prompts.
        """
        if self._below:
            blocks = list(blocks)
            self._below.difference_update(name for name, _ in blocks)
        self._add(
            {
                "type": "stored",
                "parent_hash": None if parent is None else event_hash(parent),
                "blocks": [
                    {
                        "type": "stored_block",
                        "block_hash": event_hash(name),
                        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
                        "cache_level": DEVICE,
                        "priority": DEFAULT_PRIORITY,
                    }
                    for name, tokens in blocks
                ],
                **({} if cache_salt is None else {"cache_salt": cache_salt}),
            }
        )

    def removed(self, names: Iterable[bytes]) -> None:
        """Records that contents left the device. The events report those that the host tier holds as moved there."""
        gone: list[bytes] = []
        for name in names:
            if self.is_below is not None and self.is_below(name):
                self._below.add(name)
                self._moved(name, DEVICE, HOST)
            else:
                gone.append(name)
        self._removed(gone)

    def left_host(self, names: Iterable[bytes]) -> None:
        """Records that contents left the host tier."""
        gone = [name for name in names if name in self._below]
        self._below.difference_update(gone)
        self._removed(gone)

    def returned(self, names: Iterable[bytes]) -> Collection[bytes]:
        """Records that contents came back from the host tier. Returns those that were reported before."""
        reported = {name for name in names if name in self._below}
        for name in names:
            if name in reported:
                self._moved(name, HOST, DEVICE)
        self._below -= reported
        return reported

    def _removed(self, names: list[bytes]) -> None:
        if names:
            self._add({"type": "removed", "block_hashes": [event_hash(name) for name in names]})

    def _moved(self, name: bytes, before: int, after: int) -> None:
        level = {"type": "event_diff", "old_value": before, "new_value": after}
        self._add({"type": "updated", "block_hash": event_hash(name), "cache_level": level})

    def take(self) -> list[dict[str, Any]]:
        """Returns and clears all events since the last call, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _add(self, data: dict[str, Any]) -> None:
        self._events.append({"event_id": self._next_id, "window_size": self._window_size, "data": data})
        self._next_id += 1

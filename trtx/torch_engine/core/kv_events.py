"""KV cache events in TensorRT-LLM's format: they tell a KV-aware router what this engine's prefix cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

DEFAULT_PRIORITY = 35
"""TensorRT-LLM's default retention priority of a block.

Events report it unchanged; this engine evicts by last use only.
"""


def event_hash(name: bytes) -> int:
    """A block's hash for routers: 64 bits of its name, unsigned.

    Routers use it as a hint, so a rare collision does no harm.
    """
    return int.from_bytes(name[:8], "little")


class KvEventLog:
    """Numbers events from 0 and keeps the latest ``max_size`` until ``take``; a gap in the ids means lost events.

    The first event is ``created``. A reader that sees it, or an id that restarts at 0, knows that the engine restarted.
    """

    def __init__(self, max_size: int, *, num_blocks: int, window_size: int) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._window_size = window_size
        self._next_id = 0
        self._add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    def stored(self, parent: bytes | None, blocks: Iterable[tuple[bytes, Sequence[int]]]) -> None:
        """Records stored blocks.

        ``blocks``: (name, tokens) of consecutive blocks. The first one's parent is ``parent``; None means the root.
        """
        self._add(
            {
                "type": "stored",
                "parent_hash": None if parent is None else event_hash(parent),
                "blocks": [
                    {
                        "type": "stored_block",
                        "block_hash": event_hash(name),
                        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
                        "cache_level": 0,
                        "priority": DEFAULT_PRIORITY,
                    }
                    for name, tokens in blocks
                ],
            }
        )

    def removed(self, names: Iterable[bytes]) -> None:
        self._add({"type": "removed", "block_hashes": [event_hash(name) for name in names]})

    def take(self) -> list[dict[str, Any]]:
        """Returns and clears all events since the last call, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _add(self, data: dict[str, Any]) -> None:
        self._events.append({"event_id": self._next_id, "window_size": self._window_size, "data": data})
        self._next_id += 1

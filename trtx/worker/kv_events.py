"""Publishes the engine's KV cache events through Dynamo's publisher.

The router recomputes its keys from token ids, so block hashes only have to be consistent within one engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class KvEventPublication:
    """Translates TensorRT-LLM's KV cache events of one attention-DP rank into calls of Dynamo's ``KvEventPublisher``.

    Only full blocks of the largest attention window are published. The engine also reports partial blocks, and a
    ``removed`` event for one of those would name a hash that the router never saw. Blocks that contain image positions,
    and all blocks after them, are not published either: prompts with different images have equal placeholder tokens, so
    the router would take them for the same prefix. A model with sliding windows reports each window's blocks; the
    engine lists its windows in ``created`` events, which precede all others.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._window: int | None = None
        self._next_event_id: int | None = None
        self._published: set[int] = set()  # hashes of the blocks that the router knows now
        self.lost_events = 0

    def publish(self, events: Iterable[Mapping[str, Any] | str]) -> None:
        for event in events:
            self._one(json.loads(event) if isinstance(event, str) else event)

    def _one(self, event: Mapping[str, Any]) -> None:
        data = event["data"]
        kind = data["type"]
        self._look_for_gap(event.get("event_id"))
        if kind == "created":
            self._window = max(self._window or 0, event.get("window_size") or 0)
        if self._window and event.get("window_size") not in (None, self._window):
            return
        if kind == "stored":
            self._stored(data)
        elif kind == "removed":
            self._removed({_signed(block_hash) for block_hash in data["block_hashes"]} & self._published)

    def _stored(self, data: Mapping[str, Any]) -> None:
        parent = None if data.get("parent_hash") is None else _signed(data["parent_hash"])
        if parent is not None and parent not in self._published:
            return  # the parent was lost in a gap, so the router can't attach this block
        token_ids: list[int] = []
        hashes: list[int] = []
        salt: str | None = data.get("cache_salt")
        for block in data["blocks"]:
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            if len(tokens) < self._block_size or block.get("mm_keys"):
                break
            salt = block.get("cache_salt", salt)
            token_ids += tokens
            hashes.append(_signed(block["block_hash"]))
        if not hashes:
            return
        self._published.update(hashes)
        self._publisher.publish_stored(
            token_ids, [self._block_size] * len(hashes), hashes, parent_hash=parent, cache_salt=salt
        )

    def _removed(self, hashes: set[int]) -> None:
        if hashes:
            self._published -= hashes
            self._publisher.publish_removed(sorted(hashes))

    def _look_for_gap(self, event_id: int | None) -> None:
        """Makes the router forget all blocks of this rank if the engine's ring buffer dropped events.

        The dropped events may have removed any block. Dynamo's publisher has no "clear" call, so each block is removed.
        The router learns the blocks again from later events.
        """
        if event_id is None:
            return
        if self._next_event_id is not None and event_id > self._next_event_id:
            lost = event_id - self._next_event_id
            self.lost_events += lost
            logger.warning(
                "the engine dropped %d KV events, %d since its start; the router forgets the %d blocks it knew here. "
                "A larger kv_cache_config.event_buffer_max_size keeps more",
                lost,
                self.lost_events,
                len(self._published),
            )
            self._removed(set(self._published))
        self._next_event_id = event_id + 1


def _signed(block_hash: int | str) -> int:
    """Converts an engine's block hash into the signed 64-bit integer that Dynamo takes.

    Engines use unsigned hashes. KV cache manager V2 may name a block by a SHA-256 in hex; its first 64 bits are unique
    enough within one engine.
    """
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number

"""The engine's KV events, as calls of Dynamo's publisher.

The router rebuilds its keys from token ids, so block hashes only have to be consistent within one engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class KvEventPublication:
    """Turns TensorRT-LLM's KV cache events of one attention-DP rank into calls of Dynamo's ``KvEventPublisher``.

    Only full blocks of the largest window are published: the engine also reports blocks that are not full yet, and a
    ``removed`` for one of those would name a hash that the router never saw. Nor is a block that holds a picture, and
    what comes after it: two pictures behind equal placeholders would be one to the router. A model with sliding windows
    reports each window's blocks; the engine says which windows there are in the ``created`` events before all others.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._window: int | None = None
        self._next_event_id: int | None = None
        self._published: set[int] = set()  # hashes that the router has now
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
            return  # lost in a gap: the router can't attach it
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
        """Events that the engine's ring buffer dropped may have removed any block: the router is told to forget all
        of them, and learns anew from what comes. Dynamo's publisher has no call for that but the removal of each."""
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
    """Dynamo takes signed 64-bit hashes. Engines count unsigned; KV cache manager V2 may name a block by a SHA-256 in
    hex, of which the first 64 bits are as good within one engine."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number

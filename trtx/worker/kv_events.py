"""Publishes the engine's KV cache events through Dynamo's publisher.

The router recomputes its keys from token ids, so block hashes only have to be consistent within one engine.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Block:
    parent: int | None
    token_ids: array[int]
    salt: str | None
    is_routed: bool  # the router knows the block


class KvEventPublication:
    """Translates TensorRT-LLM's KV cache events of one attention-DP rank into calls of Dynamo's ``KvEventPublisher``.

    Only full blocks of the largest attention window are published. The engine also reports partial blocks, and a
    ``removed`` event for one of those would name a hash that the router never saw. Blocks that contain image positions,
    and all blocks after them, are not published either: prompts with different images have equal placeholder tokens, so
    the router would take them for the same prefix. A model with sliding windows reports each window's blocks; the
    engine lists its windows in ``created`` events, which precede all others.

    With a host tier, a block may leave the engine before blocks that follow it in a prompt. Dynamo 1.6.1's index then
    forgets those too, and does not know them again when the block returns. So they are removed before it, and published
    again after it.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._window: int | None = None
        self._next_event_id: int | None = None
        self._blocks: dict[int, _Block] = {}  # by hash: the full blocks that the engine has reported and still holds
        self._children: dict[int, set[int]] = {}  # hashes of those by their parent's, which may be gone
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
            self._removed({_signed(block_hash) for block_hash in data["block_hashes"]} & self._blocks.keys())

    def _stored(self, data: Mapping[str, Any]) -> None:
        parent = None if data.get("parent_hash") is None else _signed(data["parent_hash"])
        if parent is not None and parent not in self._blocks:
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
        is_routed = parent is None or self._blocks[parent].is_routed
        above, size = parent, self._block_size
        for at, block_hash in enumerate(hashes):
            kept = array("q", token_ids[at * size : (at + 1) * size])
            self._blocks[block_hash] = _Block(above, kept, salt, is_routed)
            if above is not None:
                self._children.setdefault(above, set()).add(block_hash)
            above = block_hash
        if is_routed:
            self._publisher.publish_stored(token_ids, [size] * len(hashes), hashes, parent_hash=parent, cache_salt=salt)
            self._publish_below(hashes)

    def _publish_below(self, parents: list[int]) -> None:
        """Publishes the blocks below ``parents`` that the router has forgotten with them."""
        waiting = list(parents)
        while waiting:
            parent = waiting.pop()
            for block_hash in sorted(self._children.get(parent, ())):
                block = self._blocks[block_hash]
                if not block.is_routed:
                    block.is_routed = True
                    self._publisher.publish_stored(
                        list(block.token_ids), [self._block_size], [block_hash],
                        parent_hash=parent, cache_salt=block.salt,
                    )  # fmt: skip
                    waiting.append(block_hash)

    def _removed(self, hashes: set[int]) -> None:
        forgotten: list[int] = []
        for block_hash in sorted(hashes):
            if self._blocks[block_hash].is_routed:
                forgotten += self._unrouted(block_hash)
        for block_hash in hashes:
            parent = self._blocks.pop(block_hash).parent
            if parent is not None and (siblings := self._children.get(parent)) is not None:
                siblings.discard(block_hash)
                if not siblings:
                    del self._children[parent]
        if forgotten:
            self._publisher.publish_removed(forgotten)

    def _unrouted(self, block_hash: int) -> list[int]:
        """Marks a block and all below it as forgotten by the router. Returns their hashes, each before its parent's."""
        order, waiting = [], [block_hash]
        while waiting:
            found = waiting.pop()
            self._blocks[found].is_routed = False
            order.append(found)
            waiting += [child for child in self._children.get(found, ()) if self._blocks[child].is_routed]
        return order[::-1]

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
                len(self._blocks),
            )
            self._removed(set(self._blocks))
        self._next_event_id = event_id + 1


def _signed(block_hash: int | str) -> int:
    """Converts an engine's block hash into the signed 64-bit integer that Dynamo takes.

    Engines use unsigned hashes. KV cache manager V2 may name a block by a SHA-256 in hex; its first 64 bits are unique
    enough within one engine.
    """
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number

"""The engine's KV events and load, published for the router from one thread of their own.

The router rebuilds its keys from token ids, so block hashes only have to be consistent within one engine.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01
"""How late an event may reach the router; Dynamo's TensorRT-LLM backend polls every 5 to 20 ms."""
SNAPSHOT_SECONDS = 0.1
DP_RANK = 0


class KvEventPublication:
    """Turns TensorRT-LLM's KV cache events into calls of Dynamo's ``KvEventPublisher``.

    Only full blocks of the largest window are published: the engine also reports blocks that are not full yet, and a
    ``removed`` for one of those would name a hash that the router never saw.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._window: int | None = None
        self._next_event_id: int | None = None
        self._partial: set[int] = set()
        self.lost_events = 0

    def publish(self, events: Iterable[Mapping[str, Any] | str]) -> None:
        for event in events:
            self._one(json.loads(event) if isinstance(event, str) else event)

    def _one(self, event: Mapping[str, Any]) -> None:
        data = event["data"]
        kind = data["type"]
        if kind == "created":
            self._window = max(self._window or 0, event.get("window_size") or 0)
        self._count_gap(event.get("event_id"))
        if self._window and event.get("window_size") not in (None, self._window):
            return
        if kind == "stored":
            self._stored(data)
        elif kind == "removed":
            hashes = [h for h in data["block_hashes"] if h not in self._partial]
            self._partial.difference_update(data["block_hashes"])
            if hashes:
                self._publisher.publish_removed([_signed(h) for h in hashes])

    def _stored(self, data: Mapping[str, Any]) -> None:
        token_ids: list[int] = []
        hashes: list[int] = []
        salt: str | None = data.get("cache_salt")
        for block in data["blocks"]:
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            if len(tokens) < self._block_size:
                self._partial.add(block["block_hash"])
                break
            salt = block.get("cache_salt", salt)
            token_ids += tokens
            hashes.append(_signed(block["block_hash"]))
        if not hashes:
            return
        parent = data.get("parent_hash")
        self._publisher.publish_stored(
            token_ids,
            [self._block_size] * len(hashes),
            hashes,
            parent_hash=None if parent is None else _signed(parent),
            cache_salt=salt,
        )

    def _count_gap(self, event_id: int | None) -> None:
        if event_id is None:
            return
        if self._next_event_id is not None and event_id > self._next_event_id:
            self.lost_events += event_id - self._next_event_id
            logger.warning("the engine dropped %d KV events; its routing view is stale", event_id - self._next_event_id)
        self._next_event_id = event_id + 1


class EnginePoll:
    """A thread that takes KV events and iteration stats from the engine and passes them on until it is stopped."""

    def __init__(self, llm: Any, *, on_stats: Callable[[Mapping[str, Any]], None]) -> None:
        self._llm = llm
        self._on_stats = on_stats
        self._publication: KvEventPublication | None = None
        self._snapshots: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-poll", daemon=True)

    def publish_events(self, publisher: Any, block_size: int) -> None:
        self._publication = KvEventPublication(publisher, block_size)

    def publish_load(self, snapshots: Any) -> None:
        self._snapshots = snapshots

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing will be published any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def _run(self) -> None:
        ticks = 0
        while not self._stop.wait(POLL_SECONDS):
            try:
                if self._publication is not None:
                    self._publication.publish(self._llm.get_kv_cache_events(timeout=0))
                ticks += 1
                if ticks * POLL_SECONDS >= SNAPSHOT_SECONDS:
                    ticks = 0
                    self._stats()
            except Exception:
                if self._stop.is_set():
                    return
                logger.exception("the engine's KV events and stats can't be read; this poll goes on")
                self._stop.wait(1.0)

    def _stats(self) -> None:
        rows = [json.loads(row) if isinstance(row, str) else row for row in self._llm.get_stats(timeout=0)]
        if not rows:
            return
        self._on_stats(rows[-1])
        snapshot = load_snapshot(rows[-1])
        if snapshot is not None and self._snapshots is not None:
            self._snapshots.publish(DP_RANK, snapshot)


def load_snapshot(row: Mapping[str, Any]) -> ComponentSnapshot | None:
    """What the router's load model wants to know, from one row of iteration stats; None without a KV cache."""
    cache = row.get("kvCacheStats")
    if not cache or not cache.get("maxNumBlocks"):
        return None
    used, total = cache["usedNumBlocks"], cache["maxNumBlocks"]
    return ComponentSnapshot(
        kv_used_blocks=used,
        kv_total_blocks=total,
        gpu_cache_usage=used / total,
        dp_rank=DP_RANK,
        kv_cache_hit_rate=cache.get("cacheHitRate"),
    )


def _signed(block_hash: int) -> int:
    """Dynamo takes signed 64-bit hashes, engines count unsigned."""
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash

"""Polls KV events and iteration stats from the engine in a thread, and publishes them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot

from trtx.engine import Engine
from trtx.worker.kv_events import KvEventPublication

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01
"""Poll interval while the engine generates. It delays a KV event on its way to the router by at most this much.

Dynamo's TensorRT-LLM backend polls every 5 to 20 ms.
"""
SNAPSHOT_SECONDS = 0.1
"""Interval of reading stats, and of all polls while the engine does not generate: an idle engine has no KV events."""
QUIET_SECONDS = 1.0
"""How long after the last token the engine still counts as generating."""
_STATS_TIMEOUT_S = 0.01  # Dynamo's value; 0 would miss the rows that a rank has sent but that have not arrived
_READ_PAUSE_S = 1.0


class EnginePoll:
    """Polls the engine from its first generated token until :meth:`stop`.

    Before its first token, TensorRT-LLM has no events or stats. The poll's thread runs an event loop of its own and
    calls the LLM API's asynchronous methods, as Dynamo does with TensorRT-LLM 1.3.0rc22.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_stats: Callable[[Mapping[str, Any]], None],
        on_events: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``on_stats`` gets each row of iteration stats, ``on_events`` the number of KV events of each read."""
        self._engine = engine
        self._on_stats, self._on_events = on_stats, on_events
        self._publications: dict[int, KvEventPublication] = {}
        self._snapshots: Any = None
        self._token = threading.Event()  # set by a token or stop(), cleared by each poll
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="engine-poll", daemon=True)

    @property
    def lost_events(self) -> int:
        return sum(publication.lost_events for publication in self._publications.values())

    def publish_events(self, publisher: Any, block_size: int, dp_rank: int) -> None:
        self._publications[dp_rank] = KvEventPublication(publisher, block_size)

    def publish_load(self, snapshots: Any) -> None:
        self._snapshots = snapshots

    def start(self) -> None:
        self._thread.start()

    def saw_token(self) -> None:
        """Starts the polling, or ends its pause. To be called when the engine has generated a token."""
        if not self._token.is_set():  # checked for each token; setting the event again would cost ten times as much
            self._token.set()

    def stop(self) -> None:
        """Stops the thread. Nothing is published after this returns."""
        self._stop.set()
        self._token.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    async def _run(self) -> None:
        self._token.wait()
        token_at = stats_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if self._token.is_set():
                self._token.clear()
                token_at = now
            try:
                if self._publications:
                    await self._events()
                if now - stats_at >= SNAPSHOT_SECONDS:
                    stats_at = now
                    await self._stats()
                if not self._publications:
                    await asyncio.sleep(SNAPSHOT_SECONDS)
                elif now - token_at < QUIET_SECONDS:
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    self._token.wait(SNAPSHOT_SECONDS)  # blocks this thread's loop, on which nothing else runs
            except Exception:
                if self._stop.is_set():
                    return
                logger.exception("the engine's KV events and stats can't be read; this poll goes on")
                await asyncio.sleep(_READ_PAUSE_S)

    async def _events(self) -> None:
        events = await _taken(self._engine.get_kv_cache_events_async(timeout=0))
        if events:
            self._on_events(len(events))
        for event in events:
            publication = self._publications.get(event.get("attention_dp_rank") or 0)
            if publication is not None:
                publication.publish([event])

    async def _stats(self) -> None:
        latest: dict[int, Mapping[str, Any]] = {}
        for row in await _taken(self._engine.get_stats_async(timeout=_STATS_TIMEOUT_S)):
            self._on_stats(row)
            latest[row.get("attentionDpRank") or 0] = row
        for dp_rank, row in latest.items():
            snapshot = load_snapshot(row)
            if snapshot is not None and self._snapshots is not None:
                self._snapshots.publish(dp_rank, snapshot)


async def _taken(rows: AsyncIterator[Any]) -> list[Mapping[str, Any]]:
    return [json.loads(row) if isinstance(row, str) else row async for row in rows]


def load_snapshot(row: Mapping[str, Any]) -> ComponentSnapshot | None:
    """The router's load metrics from one row of iteration stats; None without a KV cache."""
    cache = row.get("kvCacheStats")
    if not cache or not cache.get("maxNumBlocks"):
        return None
    used, total = cache["usedNumBlocks"], cache["maxNumBlocks"]
    return ComponentSnapshot(
        kv_used_blocks=used,
        kv_total_blocks=total,
        gpu_cache_usage=used / total,
        dp_rank=row.get("attentionDpRank") or 0,
        kv_cache_hit_rate=cache.get("cacheHitRate"),
    )

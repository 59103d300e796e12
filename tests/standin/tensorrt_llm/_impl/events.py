"""KV cache events and iteration statistics as the real executor hands them out: bounded, gated, one stream a window."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict, deque
from typing import Any

from tensorrt_llm._facts import public
from tensorrt_llm._standin import FAULTS, LOST_EVENT_PERIOD

_POLL_SECONDS = 0.005


@public
class IterationResult:
    """Rows that come until none has come for ``timeout`` seconds. Iterating needs an event loop."""

    def __init__(self, rows: Any, timeout: float | None) -> None:
        self._rows = rows
        self._timeout = timeout or 0.0
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout
        while not (taken := self._rows.take()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return taken

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while not self._done:
            if (row := self._rows.take_one()) is not None:
                return row
            if time.monotonic() >= deadline:
                self._done = True
                break
            await asyncio.sleep(_POLL_SECONDS)
        raise StopAsyncIteration


class Rows:
    """Rows of the torch engine, taken when somebody asks. ``pull`` gives what is new."""

    def __init__(self, pull: Any, max_rows: int) -> None:
        self._pull = pull
        self._rows: deque[dict[str, Any]] = deque(maxlen=max_rows)

    def refill(self) -> None:
        self._rows.extend(self._pull())

    def take_one(self) -> dict[str, Any] | None:
        self.refill()
        return json.loads(json.dumps(self._rows.popleft())) if self._rows else None

    def take(self) -> list[dict[str, Any]]:
        self.refill()
        taken = json.loads(json.dumps(list(self._rows)))
        self._rows.clear()
        return list(taken)


class KvEvents:
    """Numbers the torch engine's events anew, as the real ring buffer would: ids rise by one, the oldest fall out.

    A model with several ``max_attention_window`` values has a stream for each. The torch engine has one window, so its
    events are given out under the widest, and again under the narrower ones with hashes of their own.
    """

    def __init__(self, pull: Any, args: Any) -> None:
        self._pull = pull
        self._windows = sorted(set(args.kv_cache_config.max_attention_window or ()), reverse=True)
        self._ranks = range(args.tensor_parallel_size) if args.enable_attention_dp else None
        self._next_ids: defaultdict[int, int] = defaultdict(int)  # by attention-DP rank

    def new(self) -> list[dict[str, Any]]:
        made = []
        for event in self._pull():
            # All work is rank 0's; of the others there is nothing to say but that they have a pool.
            ranks = self._ranks if self._ranks and event["data"]["type"] == "created" else (0,)
            for rank in ranks:
                for window in self._windows or [event["window_size"]]:
                    made += self._numbered(_of_window(event["data"], window, self._windows), window, rank)
        return made

    def _numbered(self, data: dict[str, Any], window: int, rank: int) -> list[dict[str, Any]]:
        event_id = self._next_ids[rank]
        self._next_ids[rank] += 1
        if "drop-events" in FAULTS and (event_id + 1) % LOST_EVENT_PERIOD == 0:
            return []
        event = {"event_id": event_id, "data": data, "window_size": window}
        return [event if self._ranks is None else {**event, "attention_dp_rank": rank}]


def _of_window(data: dict[str, Any], window: int, windows: list[int]) -> dict[str, Any]:
    """The event of one block pool: equal tokens have another hash in another pool."""
    if len(windows) < 2 or window == windows[0]:
        return data
    return _rehashed(data, window)


def _rehashed(value: Any, window: int) -> Any:
    if isinstance(value, list):
        return [_rehashed(item, window) if isinstance(item, dict) else _rehash(item, window) for item in value]
    changed = {}
    for key, item in value.items():
        if key in ("block_hash", "parent_hash"):
            changed[key] = None if item is None else _rehash(item, window)
        else:
            changed[key] = _rehashed(item, window) if key in ("blocks", "block_hashes") else item
    return changed


def _rehash(block_hash: int, window: int) -> int:
    return (block_hash ^ (window * 0x9E3779B97F4A7C15)) & (1 << 64) - 1

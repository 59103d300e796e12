"""The thread that polls an engine's KV events and stats."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from trtx.worker import polling
from trtx.worker.polling import EnginePoll

NEVER_S = 3600.0
SOON_S = 30.0


class _Engine:
    """An engine with one KV event and one row of stats at each poll."""

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        yield {"event_id": None, "data": {"type": "created"}}

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        yield {"iter": 1}


@pytest.fixture
def stats() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def poll(monkeypatch: pytest.MonkeyPatch, stats: threading.Semaphore) -> Iterator[EnginePoll]:
    """A poll that rests after each turn until the next token."""
    monkeypatch.setattr(polling, "QUIET_SECONDS", 0.0)
    engine: Any = _Engine()
    made = EnginePoll(engine, on_stats=lambda row: stats.release())
    made.publish_events(publisher=None, block_size=32, dp_rank=0)
    yield made
    made.stop()


def test_a_resting_poll_goes_on_with_the_next_token(
    monkeypatch: pytest.MonkeyPatch, poll: EnginePoll, stats: threading.Semaphore
) -> None:
    turns = threading.Semaphore(0)
    monkeypatch.setattr(polling, "SNAPSHOT_SECONDS", NEVER_S)
    monkeypatch.setattr(polling.KvEventPublication, "publish", lambda publication, events: turns.release())
    poll.start()
    for _ in range(3):
        poll.saw_token()
        assert turns.acquire(timeout=SOON_S)
    assert not stats.acquire(blocking=False)


def test_a_resting_poll_reads_stats_without_a_token(
    monkeypatch: pytest.MonkeyPatch, poll: EnginePoll, stats: threading.Semaphore
) -> None:
    monkeypatch.setattr(polling, "SNAPSHOT_SECONDS", 0.001)
    poll.start()
    poll.saw_token()
    for _ in range(3):
        assert stats.acquire(timeout=SOON_S)


def test_a_resting_poll_ends_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, poll: EnginePoll, stats: threading.Semaphore
) -> None:
    monkeypatch.setattr(polling, "SNAPSHOT_SECONDS", NEVER_S)
    poll.start()
    poll.saw_token()
    poll.stop()
    assert "engine-poll" not in {thread.name for thread in threading.enumerate()}

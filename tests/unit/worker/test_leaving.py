"""A worker that was told to stop stays for handoffs that are still read, and for no others; one that others serve
without leaves no card behind its endpoint."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from trtx.worker import leaving
from trtx.worker.leaving import UNREAD_SECONDS, Leaving, UnreadHandoffs
from trtx.worker.status import StatusFile


def test_handoffs_are_wanted_for_as_long_as_some_end_now_and_then() -> None:
    now = 100.0
    leases = UnreadHandoffs(lambda: now)
    for held in (3, 2, 1):
        assert leases.are_wanted(held)
        now += 0.9 * UNREAD_SECONDS
        assert leases.are_wanted(held)
    now += 0.2 * UNREAD_SECONDS
    assert not leases.are_wanted(1)
    assert not leases.are_wanted(0)


def test_waiting_for_readers_begins_when_the_last_request_has_ended() -> None:
    now = 100.0
    leases = UnreadHandoffs(lambda: now)
    assert leases.are_wanted(2)
    now += 0.9 * UNREAD_SECONDS
    leases.requests_are_open()
    now += 0.9 * UNREAD_SECONDS
    assert leases.are_wanted(2)
    assert not leases.are_wanted(0)


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What became of the worker, in order: its signals to itself, and what a test adds."""
    events: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: events.append("told to end"))
    yield events
    signal.signal(signal.SIGTERM, before)


async def died(seen: list[str], withdraw: Callable[[], Awaitable[None]] | None) -> None:
    one = Leaving("encode-0", StatusFile(None))
    one.withdraw = withdraw
    one.engine_is_dead("of a kill", open_requests=0)
    one.engine_is_dead("again", open_requests=0)
    async with asyncio.timeout(20):
        while "told to end" not in seen:
            await asyncio.sleep(0.001)
    await one.withdrawn()  # as its cleanup does


async def test_the_card_of_a_worker_whose_engine_died_goes_before_its_endpoint(seen: list[str]) -> None:
    async def withdraw() -> None:
        await asyncio.sleep(0)
        seen.append("card gone")

    await died(seen, withdraw)
    assert seen == ["card gone", "told to end"]


async def test_an_engine_that_its_worker_ends_has_not_died(seen: list[str]) -> None:
    """A request that was cut off finds it gone: the process that was told to end still ends with 0."""
    one = Leaving("prefill-0", StatusFile(None))
    one.ends_engine = True
    one.engine_is_dead("it was shut down", open_requests=1)
    assert not one.engine_died and seen == []


async def test_a_worker_without_which_nothing_is_served_ends_at_once(seen: list[str]) -> None:
    await died(seen, None)
    assert seen == ["told to end"]


async def test_a_discovery_that_fails_or_does_not_answer_keeps_no_worker(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "WITHDRAW_SECONDS", 0.05)

    async def fails() -> None:
        raise ConnectionError("no etcd")

    async def hangs() -> None:
        await asyncio.Event().wait()

    for withdraw in (fails, hangs):
        await died(seen, withdraw)
        assert seen == ["told to end"]
        seen.clear()

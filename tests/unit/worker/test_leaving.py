"""A worker that was told to stop stays for handoffs that are still read, and for no others."""

from __future__ import annotations

from trtx.worker.leaving import UNREAD_SECONDS, UnreadHandoffs


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

"""Which requests of a frontend go on, in which order the others wait, and which are refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from trtx.frontend.admission import AdmissionQueue, Bounds, Overloaded, priority_of


async def settled() -> None:
    """Lets every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def limited(slots: int, **bounds: float) -> AdmissionQueue:
    admission = AdmissionQueue(Bounds(**bounds))  # type: ignore[arg-type]
    admission.set_slots(slots)
    return admission


async def test_the_most_urgent_goes_first_and_then_the_one_that_came_first() -> None:
    admission, order = limited(1, max_queued_requests=9), list[str]()

    async def client(name: str, priority: int) -> None:
        await admission.enter(priority)
        order.append(name)

    await admission.enter()
    clients = []
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("last", -1)):
        clients.append(asyncio.ensure_future(client(name, priority)))
        await settled()
    for _ in clients:
        admission.leave(0)
        await settled()
    assert order == ["urgent", "a", "b", "last"]


async def test_a_full_queue_refuses_and_a_client_that_leaves_makes_room() -> None:
    admission = limited(1, max_queued_requests=2)
    await admission.enter()
    waiting = [asyncio.ensure_future(admission.enter()) for _ in range(2)]
    await settled()
    with pytest.raises(Overloaded, match="2 requests already wait") as refused:
        await admission.enter()
    assert refused.value.retry_s >= 1
    waiting[0].cancel()
    await settled()
    third = asyncio.ensure_future(admission.enter())
    await settled()
    assert not third.done()
    admission.leave(0)
    await settled()
    assert waiting[1].done() and not third.done()
    assert admission.counts.refused_full == 1


async def test_a_request_that_waits_too_long_is_refused_and_takes_no_slot() -> None:
    admission = limited(1, max_queue_s=0.01)
    await admission.enter()
    with pytest.raises(Overloaded, match=r"no worker was free within 0\.01 s"):
        await admission.enter()
    admission.leave(0)
    await admission.enter()
    assert admission.counts.refused_late == 1


async def test_a_client_that_leaves_when_its_turn_comes_gives_it_to_the_next() -> None:
    admission = limited(1, max_queued_requests=2)
    await admission.enter()
    first, second = (asyncio.ensure_future(admission.enter()) for _ in range(2))
    await settled()
    admission.leave(0)  # the first one's turn, which its task has not seen yet
    first.cancel()
    await settled()
    assert first.cancelled() and second.done()


async def test_a_dead_worker_takes_its_slots_along_and_without_any_worker_dynamo_answers() -> None:
    admission = limited(8, max_queued_requests=100)
    for _ in range(8):
        await admission.enter()
    waiting = [asyncio.ensure_future(admission.enter()) for _ in range(3)]
    await settled()
    admission.set_slots(4)
    for _ in range(4):
        admission.leave(0)
    await settled()
    assert not any(one.done() for one in waiting), "four are still on four slots"
    admission.leave(0)
    await settled()
    assert [one.done() for one in waiting] == [True, False, False]
    admission.set_slots(0)
    await settled()
    assert all(one.done() for one in waiting)


async def test_refused_clients_come_back_one_after_another_at_the_pace_of_the_answers() -> None:
    now = 0.0
    admission = AdmissionQueue(Bounds(max_queued_requests=1), clock=lambda: now)
    admission.set_slots(1)
    since = await admission.enter()
    now = 0.75
    admission.leave(since)  # an answer takes 0.75 s
    await admission.enter()
    waiting = asyncio.ensure_future(admission.enter())
    await settled()

    async def refused() -> int:
        with pytest.raises(Overloaded) as found:
            await admission.enter()
        return found.value.retry_s

    assert [await refused() for _ in range(4)] == [2, 3, 3, 4]
    now = 60
    assert [await refused() for _ in range(2)] != [await refused() for _ in range(2)]
    assert all([await refused() <= 60 for _ in range(100)])
    waiting.cancel()
    await settled()


async def test_frontends_share_slots_and_queue() -> None:
    admission = AdmissionQueue(Bounds(max_queued_requests=3, frontends=2))
    admission.set_slots(3)
    for _ in range(2):
        await admission.enter()
    waiting = [asyncio.ensure_future(admission.enter()) for _ in range(2)]
    await settled()
    with pytest.raises(Overloaded):
        await admission.enter()
    for one in waiting:
        one.cancel()
    await settled()


async def test_many_clients_that_leave_keep_nothing() -> None:
    admission = limited(1, max_queue_s=60)
    await admission.enter()
    for _ in range(20):
        waiting = [asyncio.ensure_future(admission.enter()) for _ in range(200)]
        await settled()
        for one in waiting:
            one.cancel()
        await settled()
    assert "trtx_frontend_waiting_requests 0" in admission.metrics()
    assert len(admission._waiting) < 100


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ([], {"nvext": {"agent_hints": {"priority": 7}}}, 7),
        ([(b"x-dynamo-request-priority", b"-2")], {"nvext": {"agent_hints": {"priority": 7}}}, -2),
        ([], {"priority": 3}, 0),
        ([], {"nvext": {"agent_hints": {"priority": "high"}}}, 0),
        ([(b"x-dynamo-request-priority", b"high")], {}, 0),
        ([], {"messages": []}, 0),
    ],
)
def test_a_priority_is_read_where_dynamo_reads_it(
    headers: list[tuple[bytes, bytes]], body: dict[str, object], priority: int
) -> None:
    assert priority_of(headers, json.dumps(body).encode()) == priority
    assert priority_of([], b'{"priority"') == 0

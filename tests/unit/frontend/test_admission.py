"""Which requests of a frontend go on, in which order the others wait, and which are refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from trtx.frontend.admission import AdmissionQueue, Bounds, Overloaded, Turn, priority_of


def limited(slots: int, **bounds: float) -> AdmissionQueue:
    admission = AdmissionQueue(Bounds(**bounds))  # type: ignore[arg-type]
    admission.set_slots(slots)
    return admission


async def test_the_most_urgent_goes_first_and_then_the_one_that_came_first() -> None:
    admission, order = limited(1, max_queued_requests=9), list[str]()

    async def client(turn: Turn, name: str) -> None:
        await turn.comes
        order.append(name)
        admission.leave(turn)

    running = admission.enter()
    urgencies = (("a", 0), ("b", 0), ("urgent", 5), ("last", -1))
    clients = [client(admission.enter(priority), name) for name, priority in urgencies]
    admission.leave(running)
    await asyncio.gather(*clients)
    assert order == ["urgent", "a", "b", "last"]


async def test_a_full_queue_refuses_and_a_client_that_leaves_makes_room() -> None:
    admission = limited(1, max_queued_requests=2)
    running = admission.enter()
    waiting = [admission.enter() for _ in range(2)]
    assert admission.is_full
    with pytest.raises(Overloaded, match="2 requests already wait") as refused:
        await admission.enter().comes
    assert refused.value.retry_s >= 1
    admission.leave(waiting[0])
    assert not admission.is_full
    third = admission.enter()
    admission.leave(running)
    assert waiting[1].comes.done() and not third.comes.done()
    assert admission.counts.refused_full == 1


async def test_a_request_that_waits_too_long_is_refused_and_takes_no_slot() -> None:
    admission = limited(1, max_queue_s=0.01)
    running, late = admission.enter(), admission.enter()
    with pytest.raises(Overloaded, match=r"no worker was free within 0\.01 s"):
        await late.comes
    admission.leave(late)
    admission.leave(running)
    await admission.enter().comes
    assert admission.counts.refused_late == 1


async def test_a_client_that_leaves_when_its_turn_comes_gives_it_to_the_next() -> None:
    admission = limited(1, max_queued_requests=2)
    running, first, second = (admission.enter() for _ in range(3))
    admission.leave(running)
    admission.leave(first)  # which has a slot by now
    admission.leave(first)
    assert second.comes.done() and admission.running_requests == 1


async def test_a_dead_worker_takes_its_slots_along_and_without_any_worker_dynamo_answers() -> None:
    admission = limited(8, max_queued_requests=100)
    running = [admission.enter() for _ in range(8)]
    waiting = [admission.enter() for _ in range(3)]
    admission.set_slots(4)
    for turn in running[:4]:
        admission.leave(turn)
    assert not any(turn.comes.done() for turn in waiting), "four are still on four slots"
    admission.leave(running[4])
    assert [turn.comes.done() for turn in waiting] == [True, False, False]
    admission.set_slots(0)
    assert all(turn.comes.done() for turn in waiting)


async def test_refused_clients_come_back_one_after_another_at_the_pace_of_the_answers() -> None:
    now = 0.0
    admission = AdmissionQueue(Bounds(max_queued_requests=1), clock=lambda: now)
    admission.set_slots(1)
    first = admission.enter()
    now = 0.75
    admission.leave(first)  # an answer takes 0.75 s
    for _ in range(2):  # one runs, one waits
        admission.enter()

    async def refused() -> int:
        with pytest.raises(Overloaded) as found:
            await admission.enter().comes
        return found.value.retry_s

    assert [await refused() for _ in range(4)] == [2, 3, 3, 4]
    now = 60
    assert [await refused() for _ in range(2)] != [await refused() for _ in range(2)]
    assert all([await refused() <= 60 for _ in range(100)])


async def test_frontends_share_slots_and_queue() -> None:
    admission = AdmissionQueue(Bounds(max_queued_requests=3, frontends=2))
    admission.set_slots(3)
    turns = [admission.enter() for _ in range(4)]
    assert [turn.comes.done() for turn in turns] == [True, True, False, False]
    with pytest.raises(Overloaded):
        await admission.enter().comes


async def test_many_clients_that_leave_keep_nothing() -> None:
    admission = limited(1, max_queue_s=60)
    admission.enter()
    for _ in range(20):
        for turn in [admission.enter() for _ in range(200)]:
            admission.leave(turn)
    assert admission.waiting_requests == 0
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

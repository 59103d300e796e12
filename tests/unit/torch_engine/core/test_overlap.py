"""The host a step behind the device: what is launched, dropped, kept and given back while a step is under way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from tests.unit.torch_engine.core.oracle_runner import undisturbed
from tests.unit.torch_engine.core.test_disaggregation import Pair
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.core.reports import ReportSender
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import FromEngine, Handoff, StepReport, Submit, Update


def stopping(length: int, at: int) -> dict[str, Any]:
    """``submit``'s arguments for a prompt whose token number ``at`` ends it."""
    prompt = prompt_of(length)
    stop = undisturbed(prompt, at + 1)[at]
    assert stop not in undisturbed(prompt, at)
    return {"prompt": prompt, "max_tokens": 50, "sampling": {"end_id": stop}}


def test_a_step_is_launched_before_the_results_of_the_one_before_are_there_unless_that_is_off() -> None:
    for overlap, most in ((True, 2), (False, 1)):
        h = Harness(overlap=overlap)
        h.submit(1, prompt_of(9), 12)
        h.run()
        assert h.tokens[1] == undisturbed(prompt_of(9), 12)
        assert h.runner.most_queued == most


def test_what_ends_by_its_length_is_launched_no_step_too_often_and_what_a_token_ends_one() -> None:
    h = Harness()
    h.submit(1, prompt_of(5), 7)
    h.run()
    assert len(h.runner.steps) == 7
    h.submit(2, **stopping(6, 4))
    h.run()
    assert h.tokens[2] == undisturbed(prompt_of(6), 5)
    assert len(h.runner.steps) == 7 + 5 + 1
    assert h.is_empty()


def until(h: Harness, reached: Callable[[], bool]) -> None:
    for _ in range(100):
        if reached():
            return
        h.step()
    raise AssertionError("not reached in 100 steps")


@pytest.mark.parametrize("how", ["stop", "abort", "fail"])
def test_an_ended_sequence_keeps_slot_and_blocks_until_the_last_step_that_has_it_is_done(how: str) -> None:
    asked = stopping(6, 4)
    bad_token = asked["sampling"]["end_id"] if how == "fail" else None
    h = Harness(batch=1, bad_token=bad_token)
    h.submit(1, **(asked if how == "stop" else {"prompt": asked["prompt"], "max_tokens": 50}))
    h.submit(2, prompt_of(3, 1), 2)
    if how == "abort":
        until(h, lambda: len(h.tokens[1]) == 5)
        h.core.abort([1])
        assert h.runner.queue
    else:
        until(h, lambda: 1 in h.finished or 1 in h.errors)
    held = [s for s in h.core.scheduler.leaving if s.sequence_id == 1]
    assert held and held[0].block_ids and held[0].slot == 0
    assert not h.core.scheduler.running, "the one slot is not given to anybody yet"
    h.run()
    assert h.tokens[1] == undisturbed(asked["prompt"], 4 if how == "fail" else 5)
    assert h.tokens[2] == undisturbed(prompt_of(3, 1), 2)
    assert h.is_empty() and not h.core.scheduler.leaving


def test_a_token_that_comes_too_late_is_in_no_block_that_others_find_and_in_no_event() -> None:
    h = Harness(event_buffer_max_size=100)
    h.submit(1, **stopping(6, 5))  # 12 tokens; the step too much fills the third block
    h.run()
    stored = [event["data"]["blocks"] for event in h.events if event["data"]["type"] == "stored"]
    assert sum(len(blocks) for blocks in stored) == h.core.scheduler.pool.num_cached == 2


def test_a_block_is_found_by_others_once_the_step_that_fills_it_is_done() -> None:
    """Before, it may turn out to hold what nobody shall reuse."""
    h = Harness(tokens=4, event_buffer_max_size=100)
    h.submit(1, prompt_of(16), 1)
    for done in range(4):
        h.step()
        stored = [event["data"]["blocks"] for event in h.events if event["data"]["type"] == "stored"]
        assert sum(len(blocks) for blocks in stored) == done
        assert h.runner.queue


def test_a_read_never_gets_blocks_that_a_step_under_way_writes_to() -> None:
    """A copy from a peer waits for no step: it would be overwritten by the sequence that had the blocks before."""
    pair = Pair(decode_blocks=4)
    pair.decode.transport.copies_at_once = True  # type: ignore[attr-defined]
    handoff = pair.context(1, prompt_of(11, 3))
    pair.decode.submit(9, prompt_of(10), 6)
    pair.decode.step()
    pair.decode.step()
    assert pair.decode.runner.queue
    pair.decode.core.abort([9])
    pair.decode.submit(1, prompt_of(11, 3), 4, handoff=handoff)
    pair.finish_decode()
    assert pair.decode.tokens[1] == undisturbed(prompt_of(11, 3), 4)
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_a_lease_is_granted_when_the_prompts_last_step_is_done_and_not_before() -> None:
    """The oracle's device writes nothing before its results are asked for, and its transport looks at the blocks."""
    pair = Pair()
    prompts = [prompt_of(length, length) for length in (30, 9, 17)]
    handoffs = [pair.context(at, prompt) for at, prompt in enumerate(prompts)]
    for at, (prompt, handoff) in enumerate(zip(prompts, handoffs, strict=True)):
        pair.decode.submit(at, prompt, 5, handoff=handoff)
    pair.finish_decode()
    assert [pair.decode.tokens[at] for at in range(3)] == [undisturbed(prompt, 5) for prompt in prompts]


def test_an_engine_with_a_step_under_way_does_not_sleep() -> None:
    h = Harness()
    h.submit(1, prompt_of(4), 1)
    h.step()
    assert h.runner.queue and h.core.wait_s == 0.0
    h.step()
    assert h.finished == {1: "length"} and h.core.wait_s is None


def test_a_report_stays_as_it_was_while_the_engine_goes_on() -> None:
    """It is encoded later, by another thread."""
    core = Pair().prefill.core
    found = []
    for sequence_id in (1, 2):
        plan = resolve_sampling(SamplingParams(max_tokens=5))
        core.submit(Submit(sequence_id, prompt_of(6, sequence_id), plan, handoff=Handoff("context_only")))
        for _ in range(3):
            report = core.step()
            if report is not None and report.handoff_stats is not None:
                found.append(report.handoff_stats)
    assert [stats.leases for stats in found] == [1, 2]


def reports(count: int) -> list[StepReport]:
    return [StepReport([Update(at, list(range(50)))]) for at in range(count)]


def test_reports_arrive_in_order_and_closing_sends_what_waits() -> None:
    ours, theirs = socket.socketpair()
    there: Channel[FromEngine] = Channel(theirs, FromEngine)
    sender = ReportSender(Channel[FromEngine](ours, FromEngine).send)
    for report in reports(100):
        sender.put(report)
    sender.close()
    ours.shutdown(socket.SHUT_WR)
    assert [there.receive() for _ in range(100)] == reports(100)
    assert there.receive() is None


def test_a_reader_that_sleeps_does_not_hold_up_the_loop_until_too_many_wait() -> None:
    may_send, sent = threading.Event(), list[int]()

    def send(message: int) -> None:
        may_send.wait()
        sent.append(message)

    sender = ReportSender(send, most_waiting=4)
    for number in range(4):
        sender.put(number)  # returns: nobody reads
    rest = threading.Thread(target=lambda: [sender.put(number) for number in range(4, 9)])
    rest.start()
    assert not sent
    may_send.set()
    rest.join()
    sender.close()
    assert sent == list(range(9))


def test_a_report_that_cannot_be_sent_is_the_loops_error() -> None:
    def send(message: int) -> None:
        raise TypeError("no such form")

    sender = ReportSender(send, most_waiting=2)
    with pytest.raises(TypeError, match="no such form"):
        for number in range(10):
            sender.put(number)
    sender.close()


def test_a_reader_that_is_gone_holds_up_nobody() -> None:
    def send(message: int) -> None:
        raise BrokenPipeError

    sender = ReportSender(send, most_waiting=2)
    for number in range(50):
        sender.put(number)
    sender.close()


def test_a_report_that_can_not_be_sent_is_told_to_a_loop_that_sleeps() -> None:
    told: SimpleQueue[Exception] = SimpleQueue()

    def send(message: int) -> None:
        raise ValueError("no such message")

    sender = ReportSender(send, told.put)
    sender.put(1)
    assert str(told.get(timeout=60)) == "no such message"
    sender.close()

"""Memory requests wait for sequences and handoffs, empty the prefix cache, and refuse in one sentence."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.unit.torch_engine.core.oracle_runner import OracleRunner, undisturbed
from tests.unit.torch_engine.core.test_disaggregation import Pair
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from tests.unit.torch_engine.core.test_host_tier import Tiered, known_to_a_router
from trtx.errors import UsageError
from trtx.torch_engine.core.sleeping import Parking
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import MemoryDone, MemoryTag, ReleaseMemory, ResumeMemory, Submit, UpdateWeights

BOTH: list[MemoryTag] = ["kv_cache", "model_weights"]


class Memory:
    """The memory of an oracle runner: it notes what was asked for, and refuses where the test wants it to."""

    def __init__(self, runner: OracleRunner) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refusal = ""
        for name in ("release", "restore", "update_weights"):
            setattr(runner, name, self._noted(name))

    def _noted(self, name: str) -> Any:
        def call(asked: Collection[MemoryTag] | Path) -> None:
            if self.refusal:
                raise UsageError(self.refusal)
            self.calls.append((name, asked if isinstance(asked, Path) else set(asked)))

        return call


class Sleeper:
    """One engine with its parking, on a clock that the test moves."""

    def __init__(self, harness: Harness, *, can_sleep: bool = True, new_transport: Any = None) -> None:
        self.harness = harness
        self.memory = Memory(harness.runner)
        self.now = 0.0
        self.refused: list[Any] = []  # updates of sequences that were held, and refused
        self.parking = Parking(
            harness.core, can_sleep=can_sleep, new_transport=new_transport, clock=lambda: self.now
        )  # fmt: skip

    def ask(self, request: Any) -> MemoryDone:
        """Adds a request, steps the engine until its answer comes, and returns it."""
        self.parking.add(request)
        return self.answer()

    def answer(self) -> MemoryDone:
        """The answer to the oldest request."""
        while not (answers := self.parking.act()):
            assert self.parking.wait_s is not None
            self.harness.step()
        self.harness.step()
        assert isinstance(answers[0], MemoryDone)
        self.refused += [update for report in answers[1:] for update in report.updates]
        return answers[0]

    def release(self, tags: list[MemoryTag] = BOTH) -> MemoryDone:
        return self.ask(ReleaseMemory(tags, 10.0))


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper(Harness(64))


def test_open_sequences_end_whole_before_anything_is_released(sleeper: Sleeper) -> None:
    sleeper.harness.submit(1, prompt_of(9), 12)
    sleeper.harness.step()
    assert sleeper.release().error is None
    assert sleeper.harness.tokens[1] == undisturbed(prompt_of(9), 12)
    assert sleeper.memory.calls == [("release", set(BOTH))]


def test_the_prefix_cache_is_empty_after_the_sleep_and_answers_are_the_same(sleeper: Sleeper) -> None:
    for sequence_id in (1, 2):
        sleeper.harness.submit(sequence_id, prompt_of(13), 6)
        sleeper.release()
        assert sleeper.ask(ResumeMemory(BOTH)).parked == []
    reused = [update.reused_blocks for update in sleeper.harness.updates if update.sequence_id == 2]
    assert not any(reused)
    assert sleeper.harness.tokens[1] == sleeper.harness.tokens[2] == undisturbed(prompt_of(13), 6)
    sleeper.harness.core.check()


def late(sequence_id: int) -> Submit:
    return Submit(sequence_id, prompt_of(5), resolve_sampling(SamplingParams(max_tokens=3)))


def test_sequences_are_refused_while_memory_is_released(sleeper: Sleeper) -> None:
    sleeper.release(["kv_cache"])
    message = sleeper.parking.submit(late(1))
    assert message is not None
    (update,) = message.updates
    assert update.error == "the engine is asleep: kv_cache released; wake it first"
    sleeper.ask(ResumeMemory(["kv_cache"]))
    assert sleeper.parking.submit(late(2)) is None
    sleeper.harness.run()
    assert sleeper.harness.tokens[2] == undisturbed(prompt_of(5), 3)


@pytest.mark.parametrize(
    "request_", [ReleaseMemory(BOTH, 10.0), UpdateWeights("/some/model", 10.0)], ids=["sleep", "update"]
)
def test_sequences_that_arrive_during_the_wait_are_held_and_can_be_aborted(sleeper: Sleeper, request_: Any) -> None:
    sleeper.harness.submit(1, prompt_of(9), 12)
    sleeper.parking.add(request_)
    for sequence_id in (2, 3):
        assert sleeper.parking.submit(late(sequence_id)) is None
    ended = sleeper.parking.abort([1, 3])
    assert ended is not None and [update.sequence_id for update in ended.updates] == [3]
    assert sleeper.answer().error is None
    sleeper.harness.run()
    assert sleeper.harness.finished[1] == "cancelled"
    if isinstance(request_, ReleaseMemory):
        assert [update.sequence_id for update in sleeper.refused] == [2]
    else:
        assert sleeper.harness.tokens[2] == undisturbed(prompt_of(5), 3)


def test_routers_are_told_that_every_block_is_gone() -> None:
    sleeper = Sleeper(Harness(64, event_buffer_max_size=100))
    sleeper.harness.submit(1, prompt_of(13), 6)
    sleeper.release()
    changes = [event["data"] for event in sleeper.harness.events]
    stored = {block["block_hash"] for change in changes if change["type"] == "stored" for block in change["blocks"]}
    removed = {name for change in changes if change["type"] == "removed" for name in change["block_hashes"]}
    assert stored and stored == removed


def test_host_copies_of_kv_are_forgotten_once_copies_under_way_have_ended() -> None:
    slow = [1]
    tiered = Tiered(16, 64, delay=lambda: slow[0])
    sleeper = Sleeper(tiered)
    for conversation in range(1, 6):
        tiered.ask(conversation, prompt_of(40, conversation))
    slow[0] = 4
    tiered.submit(6, [*prompt_of(40, 1), 3])
    for _ in range(2):
        tiered.step()
    tiered.core.abort([6])  # its load goes on
    assert sleeper.release(["kv_cache"]).error is None
    tier = tiered.core.tier
    assert tier is not None and not tier.pool.names and tier.wait_s is None
    assert sleeper.ask(ResumeMemory(["kv_cache"])).error is None
    hits = tiered.counters.hits
    tiered.ask(7, [*prompt_of(40, 1), 4])
    assert tiered.counters.hits == hits
    known, _ = known_to_a_router(tiered.events)
    assert known.keys() == {int.from_bytes(name[:8], "little") for name in tiered.core.scheduler.pool.names}


def test_work_that_does_not_end_in_time_is_named_and_nothing_is_released(sleeper: Sleeper) -> None:
    sleeper.harness.submit(1, prompt_of(5), 40)
    sleeper.harness.submit(2, prompt_of(6), 40)
    sleeper.parking.add(ReleaseMemory(BOTH, 3.0))
    sleeper.harness.step()
    sleeper.now = 2.9
    assert sleeper.parking.act() == []
    sleeper.now = 3.0
    (done,) = sleeper.parking.act()
    assert isinstance(done, MemoryDone) and done.parked == []
    assert done.error == "the engine has 2 open requests, and did not finish in time; try again, or allow more time"
    assert sleeper.memory.calls == []


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (ResumeMemory(BOTH), "the engine is not asleep, so there is nothing to wake"),
        (UpdateWeights("/nowhere", 1.0), "the weights don't fit"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_sentence_and_changes_nothing(
    sleeper: Sleeper, asked: Any, error: str
) -> None:
    sleeper.memory.refusal = "the weights don't fit"
    done = sleeper.ask(asked)
    assert (done.error, done.parked, sleeper.memory.calls) == (error, [], [])


def test_waking_what_is_awake_is_refused_beside_memory_that_is_released(sleeper: Sleeper) -> None:
    sleeper.release(["kv_cache"])
    done = sleeper.ask(ResumeMemory(BOTH))
    assert (done.error, done.parked) == ("model_weights is not released; expected kv_cache", ["kv_cache"])


def test_a_wake_that_fails_leaves_the_engine_asleep_and_can_be_tried_again(sleeper: Sleeper) -> None:
    sleeper.release()
    sleeper.memory.refusal = "the GPU has too little free memory"
    assert sleeper.ask(ResumeMemory(BOTH)).parked == BOTH
    sleeper.memory.refusal = ""
    assert sleeper.ask(ResumeMemory(BOTH)).parked == []


def test_an_engine_without_sleep_config_can_not_sleep() -> None:
    done = Sleeper(Harness(8), can_sleep=False).release()
    assert done.error is not None and "started without sleep_config" in done.error


def test_new_weights_empty_the_prefix_cache(sleeper: Sleeper) -> None:
    sleeper.harness.submit(1, prompt_of(13), 2)
    assert sleeper.ask(UpdateWeights("/some/model", 10.0)).error is None
    assert sleeper.memory.calls == [("update_weights", Path("/some/model"))]
    sleeper.harness.submit(2, prompt_of(13), 2)
    while 2 not in sleeper.harness.finished:
        sleeper.harness.step()
    assert not any(update.reused_blocks for update in sleeper.harness.updates)


def test_a_prefill_engine_waits_until_its_handoffs_are_read_and_registers_its_pool_anew() -> None:
    pair = Pair()
    transport = pair.prefill.core._handoffs._transport  # type: ignore[union-attr]
    sleeper = Sleeper(pair.prefill, new_transport=lambda: transport)
    handoff = pair.context(1, prompt_of(9))
    sleeper.parking.add(ReleaseMemory(BOTH, 5.0))
    assert sleeper.parking.act() == []
    sleeper.now = 6.0
    (done,) = sleeper.parking.act()
    assert isinstance(done, MemoryDone) and done.error is not None and "1 unread handoff" in done.error
    pair.decode.submit(1, prompt_of(9), 5, handoff=handoff)
    pair.finish_decode()
    assert sleeper.release().error is None
    assert sleeper.ask(ResumeMemory(BOTH)).error is None
    again = pair.context(2, prompt_of(9))
    pair.decode.submit(2, prompt_of(9), 5, handoff=again)
    pair.finish_decode()
    assert pair.decode.tokens[1] == pair.decode.tokens[2] == undisturbed(prompt_of(9), 5)

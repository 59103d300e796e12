"""The host tier over an oracle whose copies happen as late as they may: the tokens are those of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.oracle_runner import FULL, LeadingOracle, OracleCopies, OracleRank, undisturbed
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of, some_windows
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.host_tier import tier as tier_module
from trtx.torch_engine.messages import KvRetention, Retained, RetainedRange
from trtx.torch_engine.ranks.host_copies import RankedBlockCopies


class Tiered(Harness):
    """A small pool above a host tier of ``host_blocks``. ``ranks``: 1 or 2."""

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int,
        *,
        delay: Callable[[], int] = lambda: 1,
        min_priority: int | None = None,
        windows: tuple[int | None, ...] = FULL,
        overlap: bool = True,
        bad_token: int | None = None,
        batch: int = 8,
        tokens: int = 64,
        ranks: int = 1,
    ) -> None:
        super().__init__(num_blocks, windows=windows, bad_token=bad_token, batch=batch, tokens=tokens)
        copies: OracleCopies | RankedBlockCopies
        self.theirs: OracleCopies | None = None  # the other rank's
        if ranks > 1:
            leader = self.runner = LeadingOracle(num_blocks, windows=windows, bad_token=bad_token)
            self.theirs = OracleCopies(leader.other, host_blocks, delay)
            rank = OracleRank(self.theirs)
            own = self.copies = OracleCopies(leader, host_blocks, delay)
            copies = RankedBlockCopies(own, [rank], own.block_bytes, rank.followed.close)
        else:
            copies = self.copies = OracleCopies(self.runner, host_blocks, delay)
        self.core = EngineCore(
            self.runner,
            self.core.scheduler.limits,
            disable_overlap_scheduler=not overlap,
            event_buffer_max_size=100_000,
            enable_iter_perf_stats=True,
            host_copies=copies,
            secondary_offload_min_priority=min_priority,
        )

    @property
    def counters(self) -> tier_module.TierCounters:
        assert self.core.tier is not None
        return self.core.tier.counters

    def ask(self, sequence_id: int, prompt: list[int], max_tokens: int = 4, **fields: Any) -> None:
        """Serves one request alone, and compares its tokens."""
        self.submit(sequence_id, prompt, max_tokens, **fields)
        self.run()
        assert self.tokens[sequence_id] == undisturbed(prompt, max_tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_that_returns_after_its_eviction_is_loaded_and_not_computed(overlap: bool) -> None:
    h = Tiered(16, 64, overlap=overlap)
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 6):
        h.ask(other, prompt_of(40, other))
    computed = sum(tokens for _, tokens in h.runner.steps)
    h.ask(7, prompt_of(32, 1) + prompt_of(4, 50), 4)
    assert h.counters.loaded == h.counters.hits == 8
    assert sum(tokens for _, tokens in h.runner.steps) - computed == 4 + 3, "the new tokens, and its answer"
    assert next(u for u in h.updates if u.sequence_id == 7 and u.token_ids).reused_blocks == 8


def test_prompts_of_a_third_of_the_pool_are_stored_whole_before_their_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 16,384-token conversations of an 8B model: few steps between two of them, and few copies at once."""
    monkeypatch.setattr(tier_module, "MOST_STORING", 8)
    h = Tiered(150, 2000, tokens=64)  # blocks of 4 tokens, and a step of 64
    for number in range(1, 21):
        h.ask(number, prompt_of(200, number))
    for number in range(1, 21):
        h.ask(100 + number, [*prompt_of(200, number), 3])
    assert h.counters.dropped <= 60, "those of the first prompts, before their size was known"
    assert h.counters.loaded >= 17 * 50


def test_what_was_loaded_does_not_count_as_ready_before_older_blocks_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loaded conversation has its copy in host memory, but older blocks are evicted before it."""
    monkeypatch.setattr(tier_module, "MOST_STORING", 8)
    h = Tiered(150, 2000, tokens=64)
    for number in range(1, 7):
        h.ask(number, prompt_of(200, number), 16)
    dropped = h.counters.dropped
    for turn in range(1, 13):
        known = 7 + (turn - 1) // 3
        if turn % 3:
            h.ask(100 + turn, [*prompt_of(200, known - 5 + turn % 3), 3], 16)
        else:
            h.ask(known, prompt_of(200, known), 16)
    assert h.counters.dropped == dropped
    loaded = h.counters.loaded
    h.ask(300, [*prompt_of(200, 9), 3], 16)
    assert h.counters.loaded - loaded == 50


def test_of_too_many_evicted_blocks_the_first_of_a_prompt_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "READY_SHARE", 0.0)
    monkeypatch.setattr(tier_module, "MOST_READY_SHARE", 0.0)
    monkeypatch.setattr(tier_module, "MOST_STORING", 3)
    h = Tiered(16, 64)
    h.ask(1, prompt_of(32, 1), 1)
    h.ask(2, prompt_of(60, 2), 1)
    assert h.counters.dropped == 4, "of the seven that were evicted"
    h.ask(3, [*prompt_of(32, 1), 5], 1)
    assert h.counters.hits == 3


def test_a_host_tier_smaller_than_the_pool_does_not_copy_the_same_blocks_again_and_again() -> None:
    h = Tiered(32, 4)
    for number in range(1, 5):
        h.ask(number, prompt_of(32, number), 1)
    stored = h.counters.stored
    h.ask(9, prompt_of(3, 9), 60)
    assert h.counters.stored - stored <= 16, "at most a copy of each block that the answer replaces"


def test_a_copy_whose_content_was_needed_again_on_the_device_counts_as_used() -> None:
    h = Tiered(27, 40)
    for number in (1, 2, 3):
        h.ask(number, prompt_of(34, number), 1)
    hits = h.counters.hits
    assert h.counters.stored, "the first prompt has its copy"
    h.ask(10, [*prompt_of(34, 1), 5], 1)
    assert h.counters.hits == hits, "it is on the device still"
    for other in range(20, 27):
        h.ask(other, prompt_of(32, other), 1)
    h.ask(90, [*prompt_of(34, 1), 50], 1)
    assert h.counters.hits - hits == 8


def test_a_load_of_two_ranks_is_done_once_both_are_and_counts_the_bytes_of_both() -> None:
    h = Tiered(16, 64, ranks=2)
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 6):
        h.ask(other, prompt_of(40, other))
    theirs = h.theirs
    assert theirs is not None
    theirs.delay = lambda: 6
    h.ask(7, [*prompt_of(32, 1), 5])
    assert h.counters.loaded == 8
    stats = h.stats[-1]["hostKvCacheStats"]
    assert stats["loadedBytes"] == 8 * 2 * OracleCopies.block_bytes
    h.core.close()
    assert h.copies.is_closed and theirs.is_closed


def test_others_decode_while_a_load_is_on_its_way() -> None:
    slow = [1]
    h = Tiered(24, 64, delay=lambda: slow[0])
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 6):
        h.ask(other, prompt_of(40, other))
    h.submit(10, prompt_of(5, 9), 40)
    for _ in range(4):
        h.step()
    slow[0] = 12
    h.submit(11, [*prompt_of(32, 1), 3], 4)
    h.step()
    before = len(h.tokens[10])
    for _ in range(8):
        h.step()
    assert len(h.tokens[10]) == before + 8
    assert not h.tokens[11]
    h.run()
    assert h.tokens[11] == undisturbed([*prompt_of(32, 1), 3], 4)
    assert h.counters.loaded


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_into_blocks_that_are_still_being_stored_comes_after_the_store(ranks: int) -> None:
    slow = [1]
    h = Tiered(16, 64, delay=lambda: slow[0], ranks=ranks)
    of_last = h.copies if h.theirs is None else h.theirs
    of_last.loads_at_once = True
    for conversation in (1, 2):
        h.ask(conversation, prompt_of(48, conversation))
    slow[0] = 50
    h.ask(3, [*prompt_of(48, 1), 5])
    slow[0] = 1
    h.ask(4, [*prompt_of(48, 2), 5])
    assert h.counters.loaded > 12, "both came back"


def test_two_that_want_the_same_blocks_load_them_once() -> None:
    h = Tiered(20, 64, delay=lambda: 3)
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 7):
        h.ask(other, prompt_of(40, other))
    h.submit(10, [*prompt_of(32, 1), 1], 3)
    h.submit(11, [*prompt_of(32, 1), 2], 3)
    h.run()
    assert h.copies.num_loaded == 8
    for each in (1, 2):
        assert h.tokens[9 + each] == undisturbed([*prompt_of(32, 1), each], 3)


def test_a_load_that_does_not_come_in_time_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [1]
    h = Tiered(16, 64, delay=lambda: slow[0])
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 6):
        h.ask(other, prompt_of(32, other))
    monkeypatch.setattr(tier_module, "LOAD_TIMEOUT_S", -1.0)
    slow[0] = 6
    h.ask(7, [*prompt_of(32, 1), 5])
    assert h.counters.abandoned_loads == 1
    while h.core.wait_s is not None:
        h.step()
    assert h.is_empty(), "the blocks are free once the copy is done"


def test_a_cancelled_load_ends_for_the_client_at_once_and_frees_its_blocks_later() -> None:
    slow = [1]
    h = Tiered(16, 64, delay=lambda: slow[0])
    h.ask(1, prompt_of(32, 1))
    for other in range(2, 6):
        h.ask(other, prompt_of(32, other))
    slow[0] = 5
    h.submit(7, [*prompt_of(32, 1), 5])
    h.step()
    h.core.abort([7])
    h.step()
    assert h.finished[7] == "cancelled"
    assert not h.is_empty()
    while h.core.wait_s is not None:
        h.step()
    assert h.is_empty()


def test_another_salt_finds_nothing_on_either_tier() -> None:
    h = Tiered(16, 64)
    h.ask(1, prompt_of(32, 1), cache_salt="one")
    for other in range(2, 6):
        h.ask(other, prompt_of(40, other), cache_salt="one")
    h.ask(7, [*prompt_of(32, 1), 5], cache_salt="two")
    assert h.counters.hits == 0
    h.ask(8, [*prompt_of(32, 1), 6], cache_salt="one")
    assert h.counters.hits == 8


def test_blocks_of_a_failed_sequence_are_found_on_no_tier() -> None:
    prompt = prompt_of(32, 1)
    bad = undisturbed(prompt, 3)[2]
    h = Tiered(16, 64, bad_token=bad)
    h.submit(1, prompt, 2)
    h.run()
    assert h.core.tier is not None
    h.core.tier.counters.stored = 0
    for other in range(2, 5):
        h.submit(other, prompt_of(36, other), 1)
        h.run()
    assert h.counters.stored
    h.submit(6, prompt, 8)
    h.run()
    assert h.errors[6]
    for other in range(7, 10):
        h.submit(other, prompt_of(36, other), 1)
        h.run()
    hits = h.counters.hits
    h.submit(11, prompt, 2)
    h.run()
    assert h.counters.hits == hits


def test_blocks_below_the_least_priority_are_dropped() -> None:
    low = KvRetention([RetainedRange(0, Retained(10))], Retained(10))
    h = Tiered(16, 64, min_priority=35)
    h.ask(1, prompt_of(32, 1), retention=low)
    h.ask(2, prompt_of(32, 2))
    for other in range(3, 7):
        h.ask(other, prompt_of(40, other))
    h.ask(10, [*prompt_of(32, 1), 5])
    assert h.counters.hits == 0
    h.ask(11, [*prompt_of(32, 2), 5])
    assert h.counters.hits == 8


def test_a_prompt_that_is_retained_stays_on_the_device() -> None:
    h = Tiered(16, 4)
    high = KvRetention([RetainedRange(0, Retained(100), end=16)])
    h.ask(1, prompt_of(24, 1), retention=high)
    for other in range(2, 12):
        h.ask(other, prompt_of(40, other))
    loaded = h.counters.loaded
    h.ask(20, prompt_of(24, 1))
    first = next(u for u in h.updates if u.sequence_id == 20 and u.token_ids)
    assert first.reused_blocks == 4
    assert h.counters.loaded == loaded


def test_a_prompt_that_never_returns_displaces_none_that_does() -> None:
    h = Tiered(12, 32)  # half of the host's blocks are for what is needed again
    for turn in range(3):
        for conversation in (1, 50):
            h.ask(100 * conversation + turn, [*prompt_of(32, conversation), turn], 1)
    for other in range(6):
        h.ask(10 + other, prompt_of(36, 90 + other), 1)
    hits = h.counters.hits
    for conversation in (1, 50):
        h.ask(20 + conversation, [*prompt_of(32, conversation), 9], 1)
    assert h.counters.hits - hits == 16


def known_to_a_router(events: list[dict[str, Any]]) -> tuple[dict[int, int], set[int]]:
    """The level of each block that a router knows after the events, and the blocks that it can attach to nothing.

    A sequence can hold an unnamed copy of a block whose named one is evicted; the blocks after it have no known parent.
    """
    levels: dict[int, int] = {}
    lost: set[int] = set()
    for event in events:
        data = event["data"]
        if data["type"] == "stored":
            blocks = {block["block_hash"]: block["cache_level"] for block in data["blocks"]}
            if data["parent_hash"] is None or data["parent_hash"] in levels:
                levels |= blocks
            else:
                lost |= blocks.keys() - levels.keys()
                levels |= {block: level for block, level in blocks.items() if block in levels}
        elif data["type"] == "updated" and (data["block_hash"] in levels or data["block_hash"] not in lost):
            level = data["cache_level"]
            assert levels[data["block_hash"]] == level["old_value"]
            levels[data["block_hash"]] = level["new_value"]
        elif data["type"] == "removed":
            for block_hash in data["block_hashes"]:
                if block_hash in lost and block_hash not in levels:
                    continue
                del levels[block_hash]
    return levels, lost


def _held(h: Tiered) -> dict[int, int]:
    tier, pool = h.core.tier, h.core.scheduler.pool
    assert tier is not None
    below = {name: 1 for name in [*tier.pool.names, *tier._storing] if len(name) == 32}
    names = below | {name: 0 for name in pool.names if len(name) == 32}
    return {int.from_bytes(name[:8], "little"): level for name, level in names.items()}


conversations = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.integers(0, 4),  # conversation
        st.integers(1, 36),  # length of the prompt
        st.integers(1, 10),  # max_tokens
        st.one_of(st.none(), st.none(), st.integers(0, 12)),  # aborted so many steps later
        st.sampled_from([None, None, None, "salt"]),
        st.sampled_from([None, None, 10, 90]),  # retention priority
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=conversations,
    num_blocks=st.integers(12, 30),
    host_blocks=st.integers(1, 60),
    batch=st.integers(1, 5),
    tokens=st.integers(4, 40),
    overlap=st.booleans(),
    windows=some_windows,
    slowest=st.integers(1, 9),
    seed=st.integers(0, 1000),
    min_priority=st.sampled_from([None, 35]),
    ranks=st.sampled_from([1, 2]),
)
def test_any_mix_of_returns_aborts_and_late_copies_leaves_every_sequence_undisturbed(
    work: list[tuple[int, int, int, int, int | None, str | None, int | None]],
    num_blocks: int,
    host_blocks: int,
    batch: int,
    tokens: int,
    overlap: bool,
    windows: tuple[int | None, ...],
    slowest: int,
    seed: int,
    min_priority: int | None,
    ranks: int,
) -> None:
    """Of two ranks, each copies at its own pace."""
    dice = random.Random(seed)
    h = Tiered(
        num_blocks * len(windows), host_blocks * len(windows), delay=lambda: dice.randint(1, slowest), overlap=overlap,
        windows=windows, batch=batch, tokens=tokens, min_priority=min_priority, ranks=ranks,
    )  # fmt: skip
    prompts: dict[int, tuple[list[int], int]] = {}
    aborts: dict[int, list[int]] = {}
    now = 0

    def advance() -> None:
        nonlocal now
        h.core.abort(aborts.pop(now, []))
        h.step()
        now += 1

    for index, (wait, conversation, length, max_tokens, abort, salt, priority) in enumerate(work):
        for _ in range(wait):
            advance()
        # A salt has tokens of its own, so that a hit on the other salt's blocks would show.
        prompt = prompt_of(length, conversation)
        retention = KvRetention([RetainedRange(0, Retained(priority))]) if priority is not None else None
        prompts[index] = prompt, max_tokens
        h.submit(index, prompt, max_tokens, cache_salt=salt, retention=retention)
        if abort is not None:
            aborts.setdefault(now + abort, []).append(index)
    while aborts:
        advance()
    h.run()
    while h.core.wait_s is not None:
        h.step()
    assert h.is_empty()
    assert not h.errors
    for index, (prompt, max_tokens) in prompts.items():
        expected = undisturbed(prompt, max_tokens, windows)
        got = h.tokens[index]
        assert got == expected[: len(got)]
        assert h.finished[index] == "cancelled" or len(got) == max_tokens
    if windows[0] is None:
        known, lost = known_to_a_router(h.events)
        held = _held(h)
        assert known == {block: level for block, level in held.items() if block in known}
        assert held.keys() - known.keys() <= lost

"""The block pool: states of a block, names of its contents, order of eviction."""

from __future__ import annotations

import subprocess
import sys

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.torch_engine.core.block_names import NAME_BYTES, block_name, root_name
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.kv_events import KvEventLog, event_hash

BLOCK = [1, 2, 3, 4]
ROOT = root_name(None)


def name_of(number: int) -> bytes:
    """A block's name whose routing hash is ``number``."""
    return number.to_bytes(8, "little") + bytes([1]) * (NAME_BYTES - 8)


def test_a_name_is_of_the_tokens_and_of_everything_before_them() -> None:
    first = block_name(ROOT, BLOCK)
    assert first == block_name(ROOT, list(BLOCK))
    salted, other = block_name(root_name("salt"), BLOCK), block_name(root_name(""), BLOCK)
    assert len({first, salted, other, block_name(first, BLOCK), block_name(ROOT, [4, 3, 2, 1])}) == 5


def test_a_name_is_the_same_in_another_process() -> None:
    program = (
        "from trtx.torch_engine.core.block_names import *; print(block_name(root_name('salt'), [1, 2, 3, 4]).hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == block_name(root_name("salt"), BLOCK).hex()


def test_contents_whose_routing_hashes_meet_share_no_block() -> None:
    """Isolation by salt rests on the whole name: a router's 64 bits may meet, and a client may look for such tokens."""
    assert NAME_BYTES >= 16
    mine, theirs = name_of(7), name_of(7)[:8] + bytes(NAME_BYTES - 8)
    assert event_hash(mine) == event_hash(theirs)
    pool = BlockPool(2, 4)
    block = pool.allocate(1)
    assert block is not None
    pool.register(block, [mine], None, [BLOCK])
    assert pool.match([mine]) == block
    assert pool.match([theirs]) == []


def test_a_forgotten_block_is_found_no_more_and_free_once_let_go() -> None:
    pool = BlockPool(2, 4, events=(log := KvEventLog(10, num_blocks=2, window_size=64)))
    block = pool.allocate(1)
    assert block is not None
    pool.register(block, [name_of(7)], None, [BLOCK])
    pool.forget(block)
    pool.check([block])
    assert pool.match([name_of(7)]) == []
    pool.release(block)
    pool.check([])
    assert (pool.num_cached, pool.num_available) == (0, 2)
    assert log.take()[-1]["data"] == {"type": "removed", "block_hashes": [7]}


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    taken = pool.allocate(3)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2]
    assert pool.allocate(1) is None
    pool.check([taken])


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4, 4)
    for first in (10, 20):
        blocks = pool.allocate(2)
        assert blocks is not None
        head = block_name(ROOT, [first] * 4)
        pool.register(blocks, [head, block_name(head, BLOCK)], None, [[first] * 4, BLOCK])
        pool.release(blocks)
    old = block_name(ROOT, [10] * 4)
    assert pool.num_cached == 4
    taken = pool.allocate(1)
    assert taken is not None
    assert len(pool.match([old, block_name(old, BLOCK)])) == 1
    pool.release(taken)
    assert pool.allocate(2) is not None
    assert pool.match([old]) == []
    assert len(pool.match([block_name(ROOT, [20] * 4)])) == 1


def test_equal_contents_are_cached_once() -> None:
    pool = BlockPool(4, 4)
    one, two = pool.allocate(1), pool.allocate(1)
    assert one is not None and two is not None
    name = block_name(ROOT, BLOCK)
    pool.register(one, [name], None, [BLOCK])
    pool.register(two, [name], None, [BLOCK])
    assert pool.match([name]) == one
    pool.release(one)
    pool.release(two)
    assert (pool.num_cached, pool.num_available) == (1, 4)


def test_a_shared_block_is_cached_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate(1)
    assert block is not None
    pool.register(block, [name_of(7)], None, [BLOCK])
    pool.take(block)
    pool.release(block)
    assert pool.num_held == 1
    pool.release(block)
    assert (pool.num_held, pool.num_cached) == (0, 1)


def test_releasing_too_often_is_an_error_that_names_the_block() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate(1)
    assert block is not None
    pool.release(block)
    with pytest.raises(AssertionError, match=f"block {block[0]} was released"):
        pool.release(block)


def test_check_spells_out_references_that_nobody_holds() -> None:
    pool = BlockPool(3, 4)
    taken = pool.allocate(2)
    assert taken is not None
    with pytest.raises(AssertionError, match=r"\(counted, held\)"):
        pool.check([taken[:1]])


def test_events_overrun_shows_as_a_gap_in_the_ids() -> None:
    log = KvEventLog(2, num_blocks=5, window_size=64)
    for number in range(4):
        log.removed([name_of(number)])
    assert [event["event_id"] for event in log.take()] == [3, 4]
    assert log.take() == []


def test_a_stored_event_has_tensorrt_llms_shape() -> None:
    log = KvEventLog(10, num_blocks=4, window_size=64)
    pool = BlockPool(4, 2, events=log)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.register(blocks, [name_of(11), name_of(12)], None, [[1, 2], [3, 4]])
    assert log.take()[1] == {
        "event_id": 1,
        "window_size": 64,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": name,
                    "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
                    "cache_level": 0,
                    "priority": 35,
                }
                for name, tokens in ((11, [1, 2]), (12, [3, 4]))
            ],
        },
    }


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "reuse", "forget"]), st.integers(0, 5)), max_size=60))
def test_every_invariant_holds_after_any_sequence_of_calls(calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(8, 4, events=KvEventLog(1000, num_blocks=8, window_size=64))
    holders: list[list[int]] = []
    for number, (call, argument) in enumerate(calls):
        if call == "allocate":
            blocks = pool.allocate(argument)
            if blocks:
                holders.append(blocks)
                pool.register(blocks[:1], [name_of(argument)], None, [[number] * 4])
        elif call == "release" and holders:
            pool.release(holders.pop(argument % len(holders)))
        elif call == "reuse" and (matched := pool.match([name_of(argument)])):
            pool.take(matched)
            holders.append(matched)
        elif call == "forget" and holders:
            pool.forget(holders[argument % len(holders)])
        pool.check(holders)

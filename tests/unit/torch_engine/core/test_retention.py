"""Retention priorities: which block is evicted first, and when a priority ends."""

from __future__ import annotations

import pytest

from trtx.torch_engine.core.block_names import block_name, root_name
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.retention import retained_block
from trtx.torch_engine.messages import KvRetention, Retained, RetainedRange


class Pool:
    """A pool of four cached blocks, on a clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = BlockPool(4, 2, clock=lambda: self.now)
        self.names = [block_name(root_name(None), [index, index]) for index in range(4)]
        for name in self.names:
            blocks = self.pool.allocate(1)
            assert blocks is not None
            self.pool.register(blocks, [name], None, [[0, 0]])
            self.pool.release(blocks)

    def evicted(self, count: int) -> list[int]:
        """Which contents make room for ``count`` blocks."""
        before = [index for index, name in enumerate(self.names) if self.pool.find(name) is not None]
        blocks = self.pool.allocate(count)
        assert blocks is not None
        self.pool.check([blocks])
        self.pool.release(blocks)
        return [index for index in before if self.pool.find(self.names[index]) is None]


def test_the_lowest_priority_goes_first_and_then_the_oldest() -> None:
    h = Pool()
    h.pool.retain(h.names[0], Retained(90))
    h.pool.retain(h.names[2], Retained(10))
    assert h.evicted(1) == [2]
    assert h.evicted(2) == [1]
    assert h.evicted(3) == [3]


def test_a_priority_ends_after_its_duration_since_the_last_use() -> None:
    h = Pool()
    h.pool.retain(h.names[0], Retained(90, 10.0))
    h.now = 9.0
    found = h.pool.match([h.names[0]])
    h.pool.take(found)
    h.pool.release(found)
    h.now = 18.0
    assert h.evicted(3) == [1, 2, 3]
    h.now = 19.0
    assert h.evicted(4) == [0]


def test_a_new_content_has_no_priority_of_the_old_one() -> None:
    h = Pool()
    h.pool.retain(h.names[0], Retained(100))
    blocks = h.pool.allocate(4)
    assert blocks is not None
    name = block_name(root_name(None), [9, 9])
    h.pool.register(blocks[:1], [name], None, [[9, 9]])
    h.pool.release(blocks)
    h.names.append(name)
    assert h.evicted(4) == [4]


@pytest.mark.parametrize(("index", "priority"), [(0, 90), (1, 90), (2, None), (3, 20), (4, 5)])
def test_the_range_of_a_blocks_first_token_applies(index: int, priority: int | None) -> None:
    ranges = [RetainedRange(0, Retained(90), 9), RetainedRange(20, Retained(20))]
    found = retained_block(KvRetention(ranges, Retained(5)), index, prompt_length=30, tokens_per_block=8)
    assert (None if found is None else found.priority) == priority

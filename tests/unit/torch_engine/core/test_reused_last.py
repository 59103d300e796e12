"""The order of host memory: contents that prompts needed again leave after the others, and in the end too."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from trtx.torch_engine.core.host_tier.reused_last import ReusedLast


def taken(order: ReusedLast) -> list[int]:
    return [order.pop() for _ in range(len(order))]


def order_of(reused: Iterable[int], most: int) -> ReusedLast:
    return ReusedLast(set(reused).__contains__, most)


def test_reused_blocks_come_after_the_others_each_by_last_use() -> None:
    order = order_of({1, 3}, most=4)
    for block in (1, 2, 3, 4):
        order.add(block, 35)
    assert taken(order) == [2, 4, 1, 3]


def test_a_lower_priority_comes_first_even_if_it_is_reused() -> None:
    order = order_of({1}, most=4)
    order.add(2, 35)
    order.add(1, 10)
    assert taken(order) == [1, 2]


def test_above_the_limit_the_oldest_reused_block_is_one_of_the_others() -> None:
    order = order_of({1, 2, 3}, most=2)
    for block in (1, 2, 4, 3, 5):
        order.add(block, 35)
    assert taken(order) == [4, 1, 5, 2, 3]


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9), st.sampled_from([10, 35]))
    ),
    reused=st.sets(st.integers(0, 9)),
    most=st.integers(0, 5),
)
def test_it_holds_what_was_added_and_the_lowest_priority_comes_first(
    actions: list[tuple[str, int, int]], reused: set[int], most: int
) -> None:
    order = order_of(reused, most)
    held: dict[int, int] = {}
    for action, block, priority in actions:
        if action == "add" and block not in held:
            order.add(block, priority)
            held[block] = priority
        elif action == "discard":
            order.discard(block)
            held.pop(block, None)
        elif action == "pop" and held:
            lowest = min(held.values())
            assert held.pop(order.pop()) == lowest
        assert sorted(order) == sorted(held)
        assert len(order) == len(held)

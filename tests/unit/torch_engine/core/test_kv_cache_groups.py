"""Layer groups with windows: what a sequence holds, what a prefix hit needs, what a handoff sends."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.torch_engine.core.oracle_runner import undisturbed
from tests.unit.torch_engine.core.test_disaggregation import Pair
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.kv_cache_groups import LayerGroups, group_name
from trtx.torch_engine.kv_layout import KvGeometry, LayerGroup, first_block, layer_groups

BOTH = (None, 6)  # blocks of 4 tokens: a query sees 2 or 3 of the second group's


def held(h: Harness) -> list[int]:
    (sequence,) = h.core.scheduler.running
    return [len(blocks) for blocks in sequence.held_blocks]


def test_a_sequence_holds_the_windows_blocks_alone() -> None:
    h = Harness(64, windows=BOTH)
    h.submit(1, prompt_of(10), 60)
    most = 0
    while 1 not in h.finished:
        h.step()
        if h.core.scheduler.running and len(h.tokens[1]) > 10:
            full, windowed = held(h)
            assert full >= (10 + len(h.tokens[1])) // 4
            most = max(most, windowed)
    assert most == 3
    assert h.tokens[1] == undisturbed(prompt_of(10), 60, BOTH)
    assert h.is_empty()


def test_what_a_window_gave_back_serves_others_at_once() -> None:
    """Sequences that would not fit side by side with all of their blocks run side by side."""
    h = Harness(66, batch=2, tokens=64, windows=(None, 4), enable_iter_perf_stats=True)
    for i in range(2):
        h.submit(i, prompt_of(8, i), 80)  # 22 blocks in the one group, 2 in the other
    h.run()
    assert not any(row["inflightBatchingStats"]["numPausedRequests"] for row in h.stats)
    assert all(h.tokens[i] == undisturbed(prompt_of(8, i), 80, (None, 4)) for i in range(2))
    h = Harness(66, batch=2, tokens=64, windows=(None, None), enable_iter_perf_stats=True)
    for i in range(2):
        h.submit(i, prompt_of(8, i), 80)
    h.run()
    assert any(row["inflightBatchingStats"]["numPausedRequests"] for row in h.stats), "else this shows nothing"


@pytest.mark.parametrize("windows", [(6,), BOTH, (None, 6, 13)])
def test_a_prefix_hit_takes_of_a_window_its_last_blocks(windows: tuple[int | None, ...]) -> None:
    h = Harness(90, windows=windows)
    h.submit(1, prompt_of(30), 4)
    h.run()
    h.submit(2, prompt_of(30)[:25] + prompt_of(8, 5), 4)
    h.step()
    (sequence,) = h.core.scheduler.running
    assert sequence.num_reused == 6
    assert sequence.num_left == [first_block(window, 24, 4) for window in windows]
    h.run()
    assert h.tokens[2] == undisturbed(prompt_of(30)[:25] + prompt_of(8, 5), 4, windows)


def test_a_prefix_whose_window_is_gone_is_a_shorter_one_and_never_a_wrong_one() -> None:
    pool = BlockPool(40, 4)
    groups = LayerGroups(pool, BOTH)
    names = [bytes([at]) * 32 for at in range(8)]
    for group, present in enumerate((range(7), (0, 1, 2, 3, 5, 6, 7))):
        blocks = pool.allocate(len(present)) or []
        for at, block in zip(present, blocks, strict=True):
            pool.register([block], [group_name(names[at], group)], None, [None])
    # Behind 7 blocks a query at 28 sees 23 and later: blocks 5 and 6. Behind 6, one at 24 sees 19 and later: block 4.
    assert groups.match(names)[0] == 7
    assert groups.match(names[:6])[0] == 4
    length, matched = groups.match(names[:6])
    assert [len(blocks) for blocks in matched] == [4, 2] and length == 4
    pool.release(range(14))
    pool.check([])


@settings(max_examples=examples(300), deadline=None)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=3),
    present=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=3, max_size=3),
    asked=st.integers(0, 9),
)
@example(windows=[5, 9], present=[[True] * 9, [False] * 9, []], asked=9)
def test_a_match_is_the_longest_prefix_that_every_group_has_what_it_sees_of(
    windows: list[int | None], present: list[list[bool]], asked: int
) -> None:
    pool = BlockPool(40, 4)
    names = [bytes([at]) * 32 for at in range(9)]
    for group in range(len(windows)):
        for name, is_there in zip(names, present[group], strict=False):
            if is_there:
                pool.register(pool.allocate(1) or [], [group_name(name, group)], None, [None])

    def fits(length: int) -> bool:
        return all(
            all(present[group][max(0, length * 4 - window + 1) // 4 if window else 0 : length])
            for group, window in enumerate(windows)
        )

    length, matched = LayerGroups(pool, windows).match(names[:asked])
    if None in windows or len(windows) > 1 or windows[0] is not None:
        assert length == max(length for length in range(asked + 1) if fits(length))
    firsts = [first_block(window, length * 4, 4) for window in windows]
    found = [[pool.find(group_name(name, group)) for name in names[first:length]] for group, first in enumerate(firsts)]
    assert matched == found


def test_a_lease_keeps_and_a_read_brings_what_a_decode_sees() -> None:
    pair = Pair(windows=BOTH)
    prompt = prompt_of(30)
    handoff = pair.context(1, prompt)
    assert pair.prefill.core.scheduler.pool.num_held == 8 + 2  # of the second group those of positions 25 to 29
    pair.decode.submit(1, prompt, 20, handoff=handoff)
    pair.finish_decode()
    assert pair.decode.transport.blocks_read == 10  # type: ignore[attr-defined]
    assert pair.decode.tokens[1] == undisturbed(prompt, 20, BOTH)
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_blocks_that_no_read_brought_are_found_by_nobody() -> None:
    """Of the prompt's start the second group has nothing here; a prefix that needs it is not there."""
    pair = Pair(windows=BOTH)
    prompt = prompt_of(30)
    pair.decode.submit(1, prompt, 2, handoff=pair.context(1, prompt))
    pair.finish_decode()
    pair.decode.submit(2, prompt[:13], 5)
    pair.finish_decode()
    assert pair.decode.tokens[2] == undisturbed(prompt[:13], 5, BOTH)
    assert pair.decode.updates[-5].reused_blocks == 0


def test_nobody_reuses_what_a_failed_sequence_gave_back() -> None:
    told = undisturbed(prompt_of(20), 12, (6,))
    h = Harness(64, windows=(6,), bad_token=told[-1])
    assert told[-1] not in told[:-1]
    h.submit(1, prompt_of(20), 20)
    h.run()
    assert 1 in h.errors and h.core.scheduler.pool.num_cached == 0


def test_layers_of_one_window_are_one_group_and_the_first_sees_all() -> None:
    assert layer_groups([None] * 4, 2, 8) == (LayerGroup((0, 1, 2, 3), 2, 8),)
    assert layer_groups([5, None, 5, None], 2, 8) == (LayerGroup((1, 3), 2, 8), LayerGroup((0, 2), 2, 8, 5))
    groups = layer_groups([1024] * 5 + [None] + [1024] * 5 + [None], 1, 8)  # Gemma's pattern
    assert [len(group.layers) for group in groups] == [2, 2, 2, 2, 2, 2]
    geometry = KvGeometry(groups, 16, "float32")
    assert geometry.windows == (None, 1024, 1024, 1024, 1024, 1024)
    assert geometry.block_shape == (1, 2, 2, 16, 8)
    assert [groups[group].layers[index] for group, index in geometry.places] == list(range(12))


@given(st.lists(st.sampled_from([None, 64, 128]), min_size=1, max_size=60))
def test_every_layer_has_one_place_and_padding_stays_small(windows: list[int | None]) -> None:
    groups = layer_groups(windows, 1, 8)
    geometry = KvGeometry(groups, 16, "float32")
    assert len(groups) <= 8
    assert len(set(geometry.places)) == len(windows)
    assert all(groups[group].window == windows[layer] for layer, (group, _) in enumerate(geometry.places))
    assert None not in windows or groups[0].window is None
    assert geometry.block_layers * len(groups) - len(windows) <= max(4, len(windows) // 2)


@pytest.mark.parametrize("layers", [(), (0, 0), (1,), (0, 2)])
def test_groups_without_a_layer_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected every layer"):
        KvGeometry((LayerGroup(layers, 1, 8),), 16, "float32")


def test_groups_of_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="1 KV heads of 16; expected heads of one shape in one pool"):
        KvGeometry((LayerGroup((0,), 1, 8), LayerGroup((1,), 1, 16)), 16, "float32")

"""Work lists of attention: what a plan covers, where it splits, and that it fits into what was allocated for it."""

from __future__ import annotations

import random as dice

import pytest
import torch
from kernel_cases import IS_INTERPRETED, close, config, span_inputs
from test_ragged_attention import RAGGED, Case

from trtx.torch_engine.runner.kernels import FIXED_CHUNK, Attention, PassInputs, WorkList

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
WIDE = 128  # rows of the tile for sequences above 2,048 tokens: 32 tokens of 4 heads for each KV head


def planned(
    spans: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    processors: int = 132,
    window: int | None = None,
    attention: Attention = Attention.BY_LENGTH,
    room: int = 2048,
) -> tuple[WorkList, ...]:
    """Plans ``spans`` (tokens before the forward, new tokens), slots 0, 1, ..., without any KV."""
    from trtx.torch_engine.runner.ragged_attention import RaggedAttention

    windows = () if window is None else (window, window)
    shape = config(heads=4 * kv_heads, kv_heads=kv_heads, head_dim=16, windows=windows)
    cache = Case([(0, 1)] * len(spans), heads=(4 * kv_heads, kv_heads, 16)).cache
    ours = RaggedAttention(shape, cache, processors, fixed=attention is Attention.FIXED, fixed_part_rows=room)
    return ours.planned(inputs_of(spans), torch.float16).work


def inputs_of(spans: list[tuple[int, int]]) -> PassInputs:
    return span_inputs([(slot, *span) for slot, span in enumerate(spans)])


def items_of(work: WorkList) -> list[list[int]]:
    assert int(work.num_items) <= len(work.items)
    return work.items[: int(work.num_items)].tolist()


def chunks_of(lists: tuple[WorkList, ...]) -> dict[int, int]:
    """The number of chunks of each slot's tiles in the list of wide tiles."""
    (wide,) = (work for work in lists if work.block_rows == WIDE)
    return {item[2]: item[5] for item in items_of(wide)}


def check(spans: list[tuple[int, int]], lists: tuple[WorkList, ...], *, is_fixed: bool) -> int:
    """Asserts that each query attends once to each token that it sees. Returns the number of rows of parts."""
    seen: dict[tuple[int, int], list[int]] = {}  # by slot and position of a query
    cut = 0
    for work in lists:
        rows_of_parts: list[int] = []
        for first_row, num_rows, slot, position, index, chunks, chunk, first_part in items_of(work):
            context, new = spans[slot]
            assert first_row - sum(count for _, count in spans[:slot]) == position - context
            assert 0 < num_rows <= work.tile_rows and position + num_rows <= context + new
            length = position + num_rows
            lowest = 0 if work.window is None else max(position - work.window + 1, 0)
            begin = index * chunk + (lowest // chunk * chunk if is_fixed else lowest)
            tokens = range(lowest, length) if chunks == 1 else range(begin, min(length, begin + chunk))
            if is_fixed:
                assert chunk == FIXED_CHUNK
            for row in range(num_rows):
                seen.setdefault((slot, position + row), []).extend(tokens)
            if chunks > 1:
                rows_of_parts += range(first_part + index * num_rows, first_part + (index + 1) * num_rows)
        assert len(set(rows_of_parts)) == len(rows_of_parts)
        assert all(0 <= row < len(work.part_sums) for row in rows_of_parts)
        cut += len(rows_of_parts)
    for slot, (context, new) in enumerate(spans):
        for position in range(context, context + new):
            tokens = seen.pop((slot, position))
            first = 0 if lists[0].window is None else max(position - lists[0].window + 1, 0)
            assert len(set(tokens)) == len(tokens) and set(tokens) >= set(range(first, position + 1))
    assert not seen
    return cut


@pytest.mark.parametrize("attention", RAGGED)
@pytest.mark.parametrize("processors", [1, 3, 132])
@pytest.mark.parametrize("room", [2048, 20])  # for parts: where it is used up, tiles stay whole
def test_the_list_has_each_token_of_each_tile_once(attention: Attention, processors: int, room: int) -> None:
    spans = [(0, 1), (0, 0), (2000, 9), (511, 1), (3, 70), (1024, 33), (5000, 1)]
    lists = planned(spans, processors=processors, attention=attention, room=room)
    # By length, what lies on either side of 2,048 tokens is another list's.
    assert len(lists) == (1 if attention is Attention.FIXED else 2)
    cut = check(spans, lists, is_fixed=attention is Attention.FIXED)
    if processors == 132 and room == 2048:
        assert cut


@pytest.mark.parametrize("seed", range(24))
def test_plans_of_random_mixtures_cover_each_token_once_and_fit(seed: int) -> None:
    rolled = dice.Random(seed)
    contexts = [0, 1000, 2030, 2100, 2500, 3000, 6000, 6100]
    news = [0, 1, 31, 33, 70, 150]
    count = rolled.choice([1, 1, 2, 3, 5])
    spans = [(rolled.choice(contexts) + rolled.randint(0, 70), rolled.choice(news)) for _ in range(count)]
    spans.append((rolled.choice(contexts[3:]), rolled.choice([32, 40, 97, 180])))
    rolled.shuffle(spans)
    lists = planned(
        spans,
        kv_heads=rolled.choice([1, 2, 8]),
        processors=rolled.choice([1, 7, 66, 132]),
        window=rolled.choice([None, None, 2300, 4000]),
    )
    assert any(work.block_rows == WIDE for work in lists)
    check(spans, lists, is_fixed=False)


# Of the numbers of chunks measured on one H200, the fastest; see "Block ids a step ahead" in docs/performance-notes.md.
@pytest.mark.parametrize(
    ("spans", "chunks"),
    [
        ([(6000, 637)], 3),
        ([(11_000, 375)], 4),
        ([(2500, 375)], 1),
        ([(8000, 1024)], 1),
        ([(2048, 224)], 2),
        ([(2500, 128)], 4),
        ([(2500, 250)] * 2, 1),
        ([(2048, 512)], 1),
        ([(0, 8192)], 1),
        ([(8192, 3808)], 1),
    ],
)
def test_wide_tiles_are_split_as_was_fastest(spans: list[tuple[int, int]], chunks: int) -> None:
    assert set(chunks_of(planned(spans, kv_heads=8)).values()) == {chunks}


@pytest.mark.parametrize(
    ("spans", "processors", "chunks"),
    [
        ([(2300, 60), (7000, 33), (2040, 30)], 24, {0: 1, 1: 4, 2: 1}),
        ([(5000, 40), (2060, 5), (9000, 1), (100, 50)], 20, {0: 2, 1: 1, 2: 4}),
        ([(2100, 64), (2050, 90)], 24, {0: 2, 1: 2}),
    ],
)
def test_lists_whose_tiles_are_split_differently_equal_torch(
    spans: list[tuple[int, int]], processors: int, chunks: dict[int, int]
) -> None:
    case = Case(spans, heads=(8, 2, 16), dtype=torch.float16)
    assert chunks_of(planned(spans, processors=processors)) == chunks
    q = case.queries()
    close(case.attend(Attention.BY_LENGTH, q, case.inputs, processors), case.expected(q, case.inputs))

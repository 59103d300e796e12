"""The Triton kernel that plans a forward's work lists for :mod:`triton_ragged_attention`.

A *tile* is some adjacent new tokens of one sequence, a *chunk* a range of its KV. An item of the list is one chunk of
one tile, or the whole KV of a tile.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ITEM = tl.constexpr(8)
"""Number of int32 fields in a work item.

They are the tile's first query row, its number of rows, slot, position of its first row, the chunk's index, the number
of chunks of the tile (1: this item has all its KV), tokens in a chunk, and the first row of its partial results.
"""
_PART_TOKENS = tl.constexpr(550)
"""Time of a partial result, as KV tokens that a program with 128 query rows reads in that time.

Fitted to one H200: a wave takes 16.7 us for 1,000 tokens of KV, and each program of a split tile 9.1 us of its SM. Any
value from 250 to 900 chooses the same for all cases measured: docs/performance-notes.md, "Block ids a step ahead".
"""


@triton.jit
def chunks_by_waves(tiles, length, processors, MOST_WAVES: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """Returns the number of chunks of each sequence's tiles that takes the least time, one program on an SM at a time.

    ``tiles`` and ``length`` (KV tokens of the longest tile) are those of each sequence. A plan shares out the KV evenly
    so that split tiles have at most ``waves * processors`` programs; without a wave, all tiles are whole. Its time, in
    tokens: each wave of programs takes as long as their mean, the longest one begins last, and each part has a cost.
    """
    programs = tiles * NUM_KV_HEADS
    tokens = tl.sum(programs.to(tl.int64) * length, axis=0)
    chunks = tl.full(length.shape, 1, tl.int32)
    least = float("inf")
    for waves in range(MOST_WAVES + 1):
        tried = tl.maximum(length.to(tl.int64) * (waves * processors) // tl.maximum(tokens, 1), 1).to(tl.int32)
        all_programs = tl.sum(programs * tried, axis=0)
        parts = tl.sum(tl.where(tried > 1, programs * tried, 0), axis=0)
        longest = tl.max(tl.cdiv(length, tried), axis=0)
        mean = tokens.to(tl.float32) / tl.maximum(all_programs, 1)
        time = (tl.cdiv(all_programs, processors) - 1) * mean + longest + parts * (_PART_TOKENS / processors)
        chunks = tl.where(time < least, tried, chunks)
        least = tl.minimum(time, least)
    return chunks


@triton.jit(
    do_not_specialize=["num_sequences", "processors", "wanted_items", "fewer_items", "part_rows", "above", "up_to"]
)
def plan_kernel(
    slots, starts, contexts, num_items, items, arrived,
    padding_slot, num_sequences, processors, wanted_items, fewer_items, chunk_tokens, long_chunk, part_rows, above,
    up_to, window,
    TILE_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, FIXED: tl.constexpr,
    MOST_WAVES: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, BLOCK_ITEMS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Writes the items of one sequence for each program.

    Every program counts all sequences' items, so none waits for another. ``starts`` None: one new token for each
    sequence. ``FIXED``: chunks have ``chunk_tokens`` tokens, whatever else is in the forward; otherwise this is their
    minimum. A tile is split if its KV is longer than one of ``wanted_items`` equal shares and ``part_rows`` has room
    for its partial results. The plan aims at ``fewer_items`` instead while their chunks stay below ``long_chunk``. With
    ``MOST_WAVES`` above 0, :func:`chunks_by_waves` replaces both targets, on ``processors`` SMs. A padding slot has no
    KV; its item writes zeros. Sequences whose length, including this forward's tokens, is at most
    ``above`` or more than ``up_to`` belong to another list. All tiles of a sequence have as many chunks as the tile
    with the most KV; chunks after the end of a tile are empty.
    """
    mine = tl.program_id(0)
    sequence = tl.arange(0, BLOCK_SEQUENCES)
    known = sequence < num_sequences
    slot = tl.load(slots + sequence, mask=known, other=0)
    context = tl.load(contexts + sequence, mask=known, other=0)
    if starts is None:
        begin = sequence
        rows = known.to(tl.int32)
    else:
        begin = tl.load(starts + sequence, mask=known, other=0)
        rows = tl.load(starts + sequence + 1, mask=known, other=0) - begin
    context = tl.where(slot == padding_slot, -rows, context)
    length = context + rows
    rows = tl.where((length > above) & (length <= up_to), rows, 0)
    length = tl.where(rows > 0, length, 0)
    tiles = tl.cdiv(rows, TILE_ROWS)
    whole = tiles  # tiles that read all tokens before them; all others read window - 1
    if window is not None:
        whole = tl.minimum(tl.maximum(tl.cdiv(window - 1 - context, TILE_ROWS), 0), tiles)
    tokens = whole.to(tl.int64) * context + TILE_ROWS * (whole * (whole - 1) // 2) + rows  # summed over all tiles
    if window is not None:
        tokens += (tiles - whole).to(tl.int64) * (window - 1)
        before = window - 1
        if FIXED:
            before += chunk_tokens - 1  # chunks begin at multiples of their length
        length = tl.minimum(length, before + tl.minimum(rows, TILE_ROWS))
    all_tokens = tl.sum(tl.where(known, tokens, 0), axis=0)
    share = tl.cdiv(all_tokens, wanted_items).to(tl.int32)
    if FIXED:
        chunks = tl.where(length > 2 * share, tl.cdiv(length, chunk_tokens), 1)
        chunk = tl.full((BLOCK_SEQUENCES,), 0, tl.int32) + chunk_tokens
    else:
        if MOST_WAVES > 0:
            chunks = chunks_by_waves(tiles, length, processors, MOST_WAVES, NUM_KV_HEADS)
        else:
            ample = tl.minimum(tl.cdiv(all_tokens, fewer_items), long_chunk).to(tl.int32)
            share = tl.maximum(tl.maximum(share, ample), chunk_tokens)
            chunks = tl.maximum((length + share // 2) // share, 1)
        chunk = tl.cdiv(tl.cdiv(length, chunks), BLOCK_TOKENS) * BLOCK_TOKENS
        chunks = tl.maximum(tl.cdiv(length, tl.maximum(chunk, 1)), 1)
    needed = tl.where(chunks > 1, rows * chunks, 0)
    first_part = tl.cumsum(needed, axis=0) - needed
    fits = first_part + needed <= part_rows
    chunks = tl.where(fits, chunks, 1)
    count = tl.where(known, tiles * chunks, 0)

    first = tl.sum(tl.where(sequence < mine, count, 0), axis=0)
    if mine == 0:
        tl.store(num_items, tl.sum(count, axis=0))
    is_mine = sequence == mine
    count = tl.sum(tl.where(is_mine, count, 0), axis=0)
    begin = tl.sum(tl.where(is_mine, begin, 0), axis=0)
    rows = tl.sum(tl.where(is_mine, rows, 0), axis=0)
    tiles = tl.sum(tl.where(is_mine, tiles, 0), axis=0)
    slot = tl.sum(tl.where(is_mine, slot, 0), axis=0)
    context = tl.sum(tl.where(is_mine, context, 0), axis=0)
    chunks = tl.sum(tl.where(is_mine, chunks, 0), axis=0)
    chunk = tl.sum(tl.where(is_mine, chunk, 0), axis=0)
    first_part = tl.sum(tl.where(is_mine, first_part, 0), axis=0)

    kv_heads = tl.arange(0, BLOCK_KV_HEADS)
    for done in range(0, count, BLOCK_ITEMS):
        number = done + tl.arange(0, BLOCK_ITEMS)
        real = number < count
        # The last tile of a sequence has the most KV to read, so it starts first.
        row = (tiles - 1 - number // chunks) * TILE_ROWS
        item = items + (first + number) * ITEM
        tl.store(item, begin + row, mask=real)
        tl.store(item + 1, tl.minimum(rows - row, TILE_ROWS), mask=real)
        tl.store(item + 2, tl.zeros_like(row) + slot, mask=real)
        tl.store(item + 3, context + row, mask=real)
        tl.store(item + 4, number % chunks, mask=real)
        tl.store(item + 5, tl.zeros_like(row) + chunks, mask=real)
        tl.store(item + 6, tl.zeros_like(row) + chunk, mask=real)
        tl.store(item + 7, first_part + row * chunks, mask=real)
        counters = arrived + (first + number)[:, None] * NUM_KV_HEADS + kv_heads[None, :]
        cleared = real[:, None] & (kv_heads < NUM_KV_HEADS)[None, :]
        tl.store(counters, tl.zeros((BLOCK_ITEMS, BLOCK_KV_HEADS), tl.int32), mask=cleared)


@triton.jit
def load_item(item):
    """Loads the fields of one item; see :data:`ITEM`."""
    first_row, num_rows, slot = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2).to(tl.int64)
    position, index, chunks = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    chunk, first_part = tl.load(item + 6), tl.load(item + 7).to(tl.int64)
    return first_row, num_rows, slot, position, index, chunks, chunk, first_part

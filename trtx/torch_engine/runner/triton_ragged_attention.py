"""Triton kernels for split-KV attention balanced by length: programs that run a forward's work lists.

:mod:`triton_work_lists` plans the lists. Each KV head of an item is one program's work. The program that finishes a
tile's last chunk folds all its chunks in the order of their tokens. So there is no second launch, and the result does
not depend on the order of arrival.

The ideas come from others, the code does not: splits of a batch balanced on the device for all layers of a forward
(FlashAttention-3's scheduler metadata), a chunk length from the whole batch's tokens (FlashInfer's planner), one kernel
for decodes and prompt chunks with a group's heads packed next to query rows (vLLM's unified attention), the last
program to arrive folds (stream-K; LeanAttention, arXiv 2405.10480).

The kernels read the pool through the block table and its strides, without a copy or a layout of their own. Triton comes
with torch, compiles in seconds and supports any block size and strides; FlashInfer builds its kernels at first use with
a CUDA compiler, which a serving machine need not have.

For a float8 pool, ``kv_scales`` are the layer's two float32 scales. The kernels multiply k's into the score scale and
v's into the output sums, so that no element is scaled individually. bfloat16 queries become float16 there: one
instruction converts float8 to float16, while bfloat16 takes two, and Ada has none for it. ``out_scale`` is the input
scale of a float8 matmul that consumes the output. With or without it, the output is first rounded to q's dtype.

``window``: the number of positions that a query attends to, including its own; None: all, and the compiler leaves out
what windows need. A tile reads no KV before the window of its first row, whose block may have been freed.

``sinks`` [heads]: a logit of each head that its softmax has in addition, without a value; None: the compiler leaves out
what sinks need. It is added once for each row, when all chunks are folded.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.triton_work_lists import ITEM, load_item
from trtx.torch_engine.triton_pointwise import follow, store_result


@triton.jit
def take_tokens(query, keys, values, best, weight, sums, tokens, limits, scale, window):
    """Online softmax step: folds these tokens into each row's running state.

    ``best`` is the raw maximum of the dot products, before ``scale``, which is positive. ``tokens`` None: every row
    attends to all of them.
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if tokens is not None:
        attended = tokens[None, :] <= limits[:, None]
        if window is not None:
            attended = attended & (tokens[None, :] > limits[:, None] - window)
        scores = tl.where(attended, scores, -float("inf"))
    top = tl.maximum(best, tl.max(scores, axis=1))
    base = top
    if tokens is not None:
        base = tl.where(top > -float("inf"), top, 0.0)  # a row that has attended to no token yet
    shares = tl.exp2(scores * scale - (base * scale)[:, None])
    shrink = tl.exp2((best - base) * scale)
    weight = weight * shrink + tl.sum(shares, axis=1)
    sums = tl.dot(shares.to(query.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return top, weight, sums


@triton.jit
def blocks_before(table_row, tokens, end, TOKENS_PER_BLOCK: tl.constexpr):
    """Loads the block ids of ``tokens`` before ``end``."""
    return tl.load(table_row + tokens // TOKENS_PER_BLOCK, mask=tokens < end, other=0)


@triton.jit
def take_some_tokens(
    query, limits, pool_head, table_row, begin, end, lowest, window, best, weight, sums, scale, block_stride,
    kv_stride, token_stride,
    HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    TABLE_AHEAD: tl.constexpr,
):  # fmt: skip
    """Folds positions ``[begin, end)`` from ``lowest`` on into each row's state, up to the row's limit."""
    offsets = tl.arange(0, BLOCK_TOKENS)
    dims = tl.arange(0, BLOCK_DIM)
    if TABLE_AHEAD:
        following = blocks_before(table_row, begin + offsets, end, TOKENS_PER_BLOCK)
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + offsets
        read = tokens < end
        if window is not None:
            read = read & (tokens >= lowest)
        if TABLE_AHEAD:
            block = following
            following = blocks_before(table_row, tokens + BLOCK_TOKENS, end, TOKENS_PER_BLOCK)
        else:
            block = tl.load(table_row + tokens // TOKENS_PER_BLOCK, mask=read, other=0)
        cells = block.to(tl.int64) * block_stride + tokens % TOKENS_PER_BLOCK * token_stride
        pointers = pool_head + cells[:, None] + dims[None, :]
        loaded = read[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(pointers, mask=loaded, other=0.0).to(query.dtype)
        values = tl.load(pointers + kv_stride, mask=loaded, other=0.0).to(query.dtype)
        best, weight, sums = take_tokens(query, keys, values, best, weight, sums, tokens, limits, scale, window)
    return best, weight, sums


@triton.jit
def attend_chunk(
    query, limits, all_see, pool_head, table_row, begin, end, lowest, all_see_from, window, scale, block_stride,
    kv_stride, token_stride,
    HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WHOLE_FIRST: tl.constexpr, TABLE_AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention of each row over positions ``[begin, end)`` from ``lowest`` on, up to the row's limit.

    Returns (best score, weight, weighted sum of values). Masked tokens add zeros, so a row's numbers do not depend on
    where the other rows of its tile begin or end. With ``WHOLE_FIRST``, the tokens ``[all_see_from, all_see)``, which
    every row attends to, are processed without a mask, in whole ``BLOCK_TOKENS``. With ``TABLE_AHEAD``, each step loads
    the block ids of the next one, so that its loads of K and V do not wait for them.
    """
    offsets = tl.arange(0, BLOCK_TOKENS)
    dims = tl.arange(0, BLOCK_DIM)
    in_dim = dims < HEAD_DIM
    best = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    masked = begin
    if WHOLE_FIRST:
        if window is not None:
            masked += tl.cdiv(tl.maximum(all_see_from - begin, 0), BLOCK_TOKENS) * BLOCK_TOKENS
            masked = tl.minimum(masked, tl.maximum(end, begin))
            best, weight, sums = take_some_tokens(
                query, limits, pool_head, table_row, begin, masked, lowest, window, best, weight, sums, scale,
                block_stride, kv_stride, token_stride, HEAD_DIM, TOKENS_PER_BLOCK, BLOCK_TOKENS, BLOCK_DIM,
                TABLE_AHEAD,
            )  # fmt: skip
        first = masked
        masked += tl.maximum(tl.minimum(end, all_see) - masked, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        if TABLE_AHEAD:
            following = blocks_before(table_row, first + offsets, masked, TOKENS_PER_BLOCK)
        for start in range(first, masked, BLOCK_TOKENS):
            tokens = start + offsets
            if TABLE_AHEAD:
                block = following
                following = blocks_before(table_row, tokens + BLOCK_TOKENS, masked, TOKENS_PER_BLOCK)
            else:
                block = tl.load(table_row + tokens // TOKENS_PER_BLOCK)
            cells = block.to(tl.int64) * block_stride + tokens % TOKENS_PER_BLOCK * token_stride
            pointers = pool_head + cells[:, None] + dims[None, :]
            if HEAD_DIM == BLOCK_DIM:
                keys = tl.load(pointers).to(query.dtype)
                values = tl.load(pointers + kv_stride).to(query.dtype)
            else:
                keys = tl.load(pointers, mask=in_dim[None, :], other=0.0).to(query.dtype)
                values = tl.load(pointers + kv_stride, mask=in_dim[None, :], other=0.0).to(query.dtype)
            best, weight, sums = take_tokens(query, keys, values, best, weight, sums, None, limits, scale, window)
    best, weight, sums = take_some_tokens(
        query, limits, pool_head, table_row, masked, end, lowest, window, best, weight, sums, scale, block_stride,
        kv_stride, token_stride, HEAD_DIM, TOKENS_PER_BLOCK, BLOCK_TOKENS, BLOCK_DIM, TABLE_AHEAD,
    )  # fmt: skip
    return tl.where(best > -float("inf"), best * scale, best), weight, sums


@triton.jit
def fold(best, weight, sums, part_best, part_weight, part_sums):
    """Merges a row's state over earlier chunks with that of the next chunk. An empty chunk changes no bit.

    Each fused multiply-add is explicit: left to the compiler, two places that fold might round differently.
    """
    top = tl.maximum(best, part_best)
    base = tl.where(top > -float("inf"), top, 0.0)
    shrink = tl.exp2(best - base)
    share = tl.exp2(part_best - base)
    weight = tl.fma(part_weight, share, weight * shrink)
    shares = tl.broadcast_to(share[:, None], part_sums.shape)
    return top, weight, tl.fma(part_sums, shares, sums * shrink[:, None])


@triton.jit
def store_answer(pointers, best, weight, sums, inside, sinks, heads, is_row, kv_scales, out_scale, DTYPE: tl.constexpr):
    """Normalises and stores the output.

    Rounds to ``DTYPE`` (q's) whatever consumes it. Rows without any KV are zeros. ``heads``: each row's index into
    ``sinks``. A sink far above ``best`` makes the weight infinite and the output zero, as it should.
    """
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        weight += tl.exp2(logits * 1.4426950408889634 - best)  # log2(e)
    result = sums / tl.where(weight > 0, weight, 1.0)[:, None]
    if kv_scales is not None:
        result *= tl.load(kv_scales + 1)
    store_result(pointers, result.to(DTYPE), inside, out_scale)


@triton.jit
def fold_tokens(
    out, part_sums, part_weights, first_part, chunks, num_rows, first_row, kv_head, sinks, kv_scales, out_scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, CHUNKS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Folds the chunks of each of a tile's few tokens, ``CHUNKS`` at once, so that few loads wait for another.

    Rounds differently from :func:`fold`.
    """
    lane = tl.arange(0, LANES)
    dims = tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + lane
    for token in range(num_rows):
        best = tl.full((LANES,), -float("inf"), tl.float32)
        weight = tl.zeros((LANES,), tl.float32)
        sums = tl.zeros((LANES, BLOCK_DIM), tl.float32)
        for begin in range(0, chunks, CHUNKS):
            chunk = begin + tl.arange(0, CHUNKS)
            place = (first_part + chunk * num_rows + token)[:, None] * NUM_HEADS + heads[None, :]
            there = (chunk < chunks)[:, None] & (lane < GROUP)[None, :]
            # Other SMs wrote them: bypass this SM's L1 cache.
            parts = tl.load(
                part_sums + place[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            part_best = tl.load(part_weights + place * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
            part_weight = tl.load(part_weights + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            top = tl.maximum(best, tl.max(part_best, axis=0))
            base = tl.where(top > -float("inf"), top, 0.0)
            shrink = tl.exp2(best - base)
            shares = tl.exp2(part_best - base[None, :])
            weight = weight * shrink + tl.sum(part_weight * shares, axis=0)
            sums = sums * shrink[:, None] + tl.sum(parts * shares[:, :, None], axis=0)
            best = top
        answers = ((first_row + token) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        inside = (lane < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        store_answer(
            out + answers, best, weight, sums, inside, sinks, heads, lane < GROUP, kv_scales, out_scale, DTYPE
        )  # fmt: skip


@triton.jit
def attend_item(
    item, work, q, pool_layer, block_table, out, arrived, part_sums, part_weights, sinks, kv_scales, out_scale,
    window, scale, table_width, block_stride, kv_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FIXED: tl.constexpr, FOLD_CHUNKS: tl.constexpr, WHOLE_FIRST: tl.constexpr, TABLE_AHEAD: tl.constexpr,
):  # fmt: skip
    """Computes one KV head of one item.

    Arguments as in :func:`ragged_attention_kernel`; ``scale`` includes the keys' scale.
    """
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    lanes: tl.constexpr = BLOCK_ROWS // TILE_ROWS  # rows for each token: the group's heads, padded to a power of two
    rows = tl.arange(0, BLOCK_ROWS)
    token = rows // lanes
    dims = tl.arange(0, BLOCK_DIM)
    in_dim = dims < HEAD_DIM
    number = work // NUM_KV_HEADS
    kv_head = work % NUM_KV_HEADS
    first_row, num_rows, slot, position, index, chunks, chunk, first_part = item

    in_tile = (token < num_rows) & (rows % lanes < group)
    inside = in_tile[:, None] & in_dim[None, :]
    heads = kv_head * group + rows % lanes
    answers = ((first_row + token) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + answers, mask=inside, other=0.0)
    if kv_scales is not None and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    limits = tl.where(in_tile, position + token, -1)
    length = position + num_rows
    pool_head = pool_layer + kv_head * head_stride
    table_row = block_table + slot * table_width
    begin = index * chunk
    lowest = 0  # position that the first row attends to first
    all_see_from = 0
    if window is not None:
        lowest = tl.maximum(position - window + 1, 0)
        all_see_from = length - window
        begin += lowest // chunk * chunk if FIXED else lowest
    end = tl.where(chunks == 1, length, tl.minimum(begin + chunk, length))
    if FIXED:
        best = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_ROWS,), tl.float32)
        sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        for start in range(begin, end, chunk):
            first = start
            if window is not None:
                first = tl.maximum(start, lowest // BLOCK_TOKENS * BLOCK_TOKENS)
            part_best, part_weight, part = attend_chunk(
                query, limits, position + 1, pool_head, table_row, first, tl.minimum(start + chunk, end), lowest,
                all_see_from, window, scale, block_stride, kv_stride, token_stride,
                HEAD_DIM, TOKENS_PER_BLOCK, BLOCK_ROWS, BLOCK_TOKENS, BLOCK_DIM, False, TABLE_AHEAD,
            )  # fmt: skip
            best, weight, sums = fold(best, weight, sums, part_best, part_weight, part)
    else:
        best, weight, sums = attend_chunk(
            query, limits, position + 1, pool_head, table_row, begin, end, lowest, all_see_from, window, scale,
            block_stride, kv_stride, token_stride,
            HEAD_DIM, TOKENS_PER_BLOCK, BLOCK_ROWS, BLOCK_TOKENS, BLOCK_DIM, WHOLE_FIRST, TABLE_AHEAD,
        )  # fmt: skip

    if chunks == 1:
        store_answer(
            out + answers, best, weight, sums, inside, sinks, heads, in_tile, kv_scales, out_scale, q.dtype.element_ty
        )  # fmt: skip
    else:
        own = (first_part + index * num_rows + token) * NUM_HEADS + heads
        tl.store(part_sums + own[:, None] * HEAD_DIM + dims[None, :], sums, mask=inside)
        tl.store(part_weights + own * 2, best, mask=in_tile)
        tl.store(part_weights + own * 2 + 1, weight, mask=in_tile)
        # All stores of this program come before its arrival; the loads below come after every program's arrival.
        tl.debug_barrier()
        counter = arrived + (number - index) * NUM_KV_HEADS + kv_head
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == chunks - 1:
            tl.store(counter, 0)  # for the next layer
            if FOLD_CHUNKS > 1:
                fold_tokens(
                    out, part_sums, part_weights, first_part, chunks, num_rows, first_row, kv_head, sinks, kv_scales,
                    out_scale, NUM_HEADS, group, lanes, HEAD_DIM, BLOCK_DIM, FOLD_CHUNKS, q.dtype.element_ty,
                )  # fmt: skip
            else:
                best = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
                weight = tl.zeros((BLOCK_ROWS,), tl.float32)
                sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
                for other in range(chunks):
                    place = (first_part + other * num_rows + token) * NUM_HEADS + heads
                    # Other SMs wrote them: bypass this SM's L1 cache.
                    parts = part_sums + place[:, None] * HEAD_DIM + dims[None, :]
                    part = tl.load(parts, mask=inside, other=0.0, cache_modifier=".cg")
                    weights = part_weights + place * 2
                    part_best = tl.load(weights, mask=in_tile, other=-float("inf"), cache_modifier=".cg")
                    part_weight = tl.load(weights + 1, mask=in_tile, other=0.0, cache_modifier=".cg")
                    best, weight, sums = fold(best, weight, sums, part_best, part_weight, part)
                store_answer(
                    out + answers, best, weight, sums, inside, sinks, heads, in_tile, kv_scales, out_scale,
                    q.dtype.element_ty,
                )  # fmt: skip


@triton.jit
def ragged_attention_kernel(
    q, pool_layer, block_table, out, num_items, items, arrived, part_sums, part_weights, sinks, kv_scales, out_scale,
    window, scale, table_width, block_stride, kv_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FIXED: tl.constexpr, FOLD_CHUNKS: tl.constexpr, WHOLE_FIRST: tl.constexpr, TABLE_AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Attention over a work list. q and out are [tokens, heads, dim].

    ``BLOCK_ROWS`` rows of a matmul are ``TILE_ROWS`` tokens times the query heads of a KV head. ``part_sums`` [rows,
    heads, dim] and ``part_weights`` [rows, heads, 2] float32 hold the partial results of tiles with several chunks;
    ``arrived`` [items, kv_heads] counts the finished ones and is zero before and after.

    ``FIXED``: a tile that is a single item is computed in the same chunks, so that the list changes no bit of a result.
    A program then loops over several items, as there may be many more than the grid has room for. The loop costs
    registers, so without ``FIXED`` a program processes one item.
    """
    follow(OVERLAPS)
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
    total = tl.load(num_items) * NUM_KV_HEADS
    if FIXED:
        for work in range(tl.program_id(0), total, tl.num_programs(0)):
            attend_item(
                load_item(items + work // NUM_KV_HEADS * ITEM), work, q, pool_layer, block_table, out, arrived,
                part_sums, part_weights, sinks, kv_scales, out_scale, window, scale, table_width, block_stride,
                kv_stride, token_stride, head_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK, TILE_ROWS,
                BLOCK_ROWS, BLOCK_TOKENS, BLOCK_DIM, FIXED, FOLD_CHUNKS, WHOLE_FIRST, TABLE_AHEAD,
            )  # fmt: skip
    else:
        work = tl.program_id(0)
        item = load_item(items + work // NUM_KV_HEADS * ITEM)  # loaded before the bounds check: both loads overlap
        if work < total:
            attend_item(
                item, work, q, pool_layer, block_table, out, arrived, part_sums, part_weights, sinks, kv_scales,
                out_scale, window, scale, table_width, block_stride, kv_stride, token_stride, head_stride, NUM_HEADS,
                NUM_KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK, TILE_ROWS, BLOCK_ROWS, BLOCK_TOKENS, BLOCK_DIM, FIXED,
                FOLD_CHUNKS, WHOLE_FIRST, TABLE_AHEAD,
            )  # fmt: skip

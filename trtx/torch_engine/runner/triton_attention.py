"""Triton kernels for attention over the paged KV pool: split-KV decode, and causal prefill of many sequences.

Both read the pool through the block table and its strides, without a copy or a layout of their own. Triton comes with
torch, compiles in seconds and supports any block size and strides; FlashInfer builds its kernels at first use with a
CUDA compiler, which a serving machine need not have.

For a float8 pool, ``kv_scales`` are the layer's two float32 scales. The kernels multiply k's into the score scale and
v's into the output sums, so that no element is scaled individually. bfloat16 queries become float16 there: one
instruction converts float8 to float16, while bfloat16 takes two, and Ada has none for it. ``out_scale`` is the input
scale of a float8 matmul that consumes the output. With or without it, the output is first rounded to q's dtype.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.triton_pointwise import follow, store_result


@triton.jit
def paged_decode_kernel(
    q, pool_layer, block_table, slots, positions, out, partial, partial_lse, kv_scales, out_scale,
    scale, table_width, padding_slot, block_stride, kv_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Split-KV decode. A program computes one split of one sequence, for all query heads of one KV head.

    With one split, the result goes to ``out`` [rows, heads, dim]. With more, normalised partial results go to
    ``partial`` [rows, heads, splits, dim] and their log-sum-exp (base 2) to ``partial_lse`` [rows, heads, splits].
    """
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(positions + row) + 1
    length = tl.where(slot == padding_slot, 0, length)
    part = tl.cdiv(tl.cdiv(length, NUM_SPLITS), BLOCK_TOKENS) * BLOCK_TOKENS
    begin = split * part
    end = tl.minimum(begin + part, length)

    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    in_group = heads < group
    in_dim = dims < HEAD_DIM
    q_rows = row * NUM_HEADS + kv_head * group + heads
    inside = in_group[:, None] & in_dim[None, :]
    query = tl.load(q + q_rows[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    if kv_scales is not None and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)

    if kv_scales is not None:
        scale *= tl.load(kv_scales)
    best = tl.full((BLOCK_HEADS,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_HEADS,), tl.float32)
    sums = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        seen = tokens < end
        block = tl.load(block_table + slot * table_width + tokens // TOKENS_PER_BLOCK, mask=seen, other=0).to(tl.int64)
        cells = block * block_stride + (tokens % TOKENS_PER_BLOCK) * token_stride + kv_head * head_stride
        pointers = pool_layer + cells[:, None] + dims[None, :]
        loaded = seen[:, None] & in_dim[None, :]
        keys = tl.load(pointers, mask=loaded, other=0.0).to(query.dtype)
        values = tl.load(pointers + kv_stride, mask=loaded, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shares = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(best - top)
        weight = weight * shrink + tl.sum(shares, axis=1)
        sums = sums * shrink[:, None] + tl.dot(shares.to(query.dtype), values, input_precision="ieee")
        best = top

    sums = sums / tl.where(weight > 0, weight, 1.0)[:, None]
    if kv_scales is not None:
        sums *= tl.load(kv_scales + 1)
    if NUM_SPLITS == 1:
        store_result(out + q_rows[:, None] * HEAD_DIM + dims[None, :], sums.to(q.dtype.element_ty), inside, out_scale)
    else:
        places = q_rows * NUM_SPLITS + split
        tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], sums, mask=inside)
        lse = tl.where(weight > 0, best + tl.log2(tl.where(weight > 0, weight, 1.0)), -float("inf"))
        tl.store(partial_lse + places, lse, mask=in_group)


@triton.jit
def merge_splits_kernel(
    partial, partial_lse, out, out_scale,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Merges the splits of one query head of one row, weighted by their log-sum-exp, for each program.

    ``DTYPE``: q's.
    """
    follow(OVERLAPS)
    place = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_DIM)
    in_dim = dims < HEAD_DIM
    lse = tl.load(partial_lse + place * NUM_SPLITS + splits)
    best = tl.max(lse, axis=0)
    shares = tl.exp2(lse - tl.where(best > -float("inf"), best, 0.0))
    total = tl.sum(shares, axis=0)
    shares = shares / tl.where(total > 0, total, 1.0)
    pointers = partial + (place * NUM_SPLITS + splits[:, None]) * HEAD_DIM + dims[None, :]
    parts = tl.load(pointers, mask=in_dim[None, :], other=0.0)
    result = tl.sum(parts * shares[:, None], axis=0).to(DTYPE)
    store_result(out + place * HEAD_DIM + dims, result, in_dim, out_scale)


@triton.jit
def paged_prefill_kernel(
    q, pool_layer, block_table, slots, starts, contexts, out, kv_scales, out_scale,
    scale, table_width, block_stride, kv_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Causal prefill: ``BLOCK_QUERIES`` new tokens of one sequence and one query head for each program.

    q and out are [tokens, heads, dim].
    """
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - first
    # The last blocks of a sequence have the most KV to read, so they start first.
    queries = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    lowest = tl.min(queries, axis=0)
    if lowest < length:
        context = tl.load(contexts + sequence)
        slot = tl.load(slots + sequence).to(tl.int64)
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        dims = tl.arange(0, BLOCK_DIM)
        in_dim = dims < HEAD_DIM
        inside = (queries < length)[:, None] & in_dim[None, :]
        q_rows = (first + queries).to(tl.int64) * NUM_HEADS + head
        query = tl.load(q + q_rows[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        if kv_scales is not None and query.dtype == tl.bfloat16:
            query = query.to(tl.float16)

        if kv_scales is not None:
            scale *= tl.load(kv_scales)
        best = tl.full((BLOCK_QUERIES,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_QUERIES,), tl.float32)
        sums = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), tl.float32)
        end = context + tl.minimum(lowest + BLOCK_QUERIES, length)
        for start in range(0, end, BLOCK_TOKENS):
            tokens = start + tl.arange(0, BLOCK_TOKENS)
            seen = tokens < end
            block = tl.load(block_table + slot * table_width + tokens // TOKENS_PER_BLOCK, mask=seen, other=0)
            cells = (
                block.to(tl.int64) * block_stride + (tokens % TOKENS_PER_BLOCK) * token_stride + kv_head * head_stride
            )
            pointers = pool_layer + cells[:, None] + dims[None, :]
            loaded = seen[:, None] & in_dim[None, :]
            keys = tl.load(pointers, mask=loaded, other=0.0).to(query.dtype)
            values = tl.load(pointers + kv_stride, mask=loaded, other=0.0).to(query.dtype)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(tokens[None, :] <= (context + queries)[:, None], scores, -float("inf"))
            top = tl.maximum(best, tl.max(scores, axis=1))
            shares = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(best - top)
            weight = weight * shrink + tl.sum(shares, axis=1)
            sums = sums * shrink[:, None] + tl.dot(shares.to(query.dtype), values, input_precision="ieee")
            best = top
        sums = sums / weight[:, None]
        if kv_scales is not None:
            sums *= tl.load(kv_scales + 1)
        store_result(out + q_rows[:, None] * HEAD_DIM + dims[None, :], sums.to(q.dtype.element_ty), inside, out_scale)

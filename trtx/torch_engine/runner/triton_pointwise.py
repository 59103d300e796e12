"""Triton kernels for what lies between the matrix products: norms, rotation with the KV write, the gate."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total_out, hidden, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program. With a residual: ``total_out = x + residual``, rounded, is what is normalised."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < hidden
    values = tl.load(x + row * hidden + offsets, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * hidden + offsets, mask=inside, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(values.dtype)
        tl.store(total_out + row * hidden + offsets, values, mask=inside)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / hidden + eps)
    normed = (exact * scale).to(values.dtype) * tl.load(weight + offsets, mask=inside, other=0.0)
    tl.store(out + row * hidden + offsets, normed, mask=inside)


@triton.jit
def rope_and_write_kernel(
    qkv, q_out, q_norm, k_norm, rotary, positions, slots, block_table, pool_layer,
    eps, table_width, padding_slot, block_stride, kv_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token a program: q heads go to ``q_out``, k and v heads into the pool's own strides.

    ``pool_layer`` is ``pool[:, layer]``; a head is ``HEAD_DIM`` adjacent elements, heads of a token are adjacent.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    offsets = tl.arange(0, BLOCK)
    inside = offsets < half
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + offsets, mask=inside, other=0.0)
    second = tl.load(source + half + offsets, mask=inside, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    if head < NUM_HEADS + NUM_KV_HEADS:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORM:
            norm = q_norm if head < NUM_HEADS else k_norm
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / HEAD_DIM + eps)
            a = ((a * scale).to(first.dtype) * tl.load(norm + offsets, mask=inside, other=0.0)).to(tl.float32)
            b = ((b * scale).to(first.dtype) * tl.load(norm + half + offsets, mask=inside, other=0.0)).to(tl.float32)
        cos = tl.load(rotary + position * HEAD_DIM + offsets, mask=inside, other=0.0)
        sin = tl.load(rotary + position * HEAD_DIM + half + offsets, mask=inside, other=0.0)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
    if head < NUM_HEADS:
        target = q_out + (token * NUM_HEADS + head) * HEAD_DIM
        tl.store(target + offsets, first, mask=inside)
        tl.store(target + half + offsets, second, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot != padding_slot:
            block = tl.load(block_table + slot * table_width + position // TOKENS_PER_BLOCK).to(tl.int64)
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            is_value = (head - NUM_HEADS) // NUM_KV_HEADS
            cell = pool_layer + block * block_stride + is_value * kv_stride
            cell += (position % TOKENS_PER_BLOCK) * token_stride + kv_head * HEAD_DIM
            tl.store(cell + offsets, first.to(pool_layer.dtype.element_ty), mask=inside)
            tl.store(cell + half + offsets, second.to(pool_layer.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up, out, intermediate, BLOCK: tl.constexpr):
    """``silu(gate) * up``: a block of one row a program; silu in float32, rounded before the product as torch does."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < intermediate
    gate = tl.load(gate_up + row * 2 * intermediate + offsets, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * intermediate + offsets, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    tl.store(out + row * intermediate + offsets, silu * up, mask=inside)

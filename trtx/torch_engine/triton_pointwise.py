"""Triton kernels between the matmuls: RMSNorm, RoPE with the KV write, SiLU and GELU gates."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FP8_MAX = tl.constexpr(448.0)  # of float8_e4m3fn


@triton.jit
def to_fp8(values, scale):
    """Returns ``values / scale``, saturated, in float8_e4m3fn: an operand of a matmul, or a KV cache entry."""
    return tl.clamp(values.to(tl.float32) / scale, -_FP8_MAX, _FP8_MAX).to(tl.float8e4nv)


@triton.jit
def store_result(pointers, values, mask, scale):
    """Stores ``values`` unchanged, or in float8_e4m3fn if ``scale`` (a float32 scalar in memory) is given."""
    if scale is not None:
        values = to_fp8(values, tl.load(scale))
    tl.store(pointers, values, mask=mask)


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Programmatic dependent launch: lets the next kernel start early, then waits for the previous kernel's results.

    Does nothing unless ``OVERLAPS``.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _scale_of(largest):
    """Returns the scale that maps a magnitude to the largest of float8; 1 for zero."""
    return tl.where(largest > 0, largest / _FP8_MAX, 1.0)


@triton.jit
def quantize_rows_kernel(x, out, scales, columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr = False):
    """Quantizes one row of ``x`` for each program to float8_e4m3fn, with a scale of its own."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(x + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(values), axis=0))
    tl.store(scales + row, scale)
    tl.store(out + row * columns + offsets, to_fp8(values, scale), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def quantize_groups_kernel(
    x, out, scales, num_rows, padded_rows, columns, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Quantizes ``GROUPS`` groups of ``WIDTH`` columns of one row for each program, each group with its own scale.

    ``columns`` is a multiple of ``WIDTH``. ``scales`` [groups, padded_rows]. Rows from ``num_rows`` on are zeros.
    """
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = offsets < columns
    values = tl.load(x + row * columns + offsets, mask=inside & (row < num_rows), other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(values), axis=1))
    tl.store(scales + groups.to(tl.int64) * padded_rows + row, scale, mask=groups * WIDTH < columns)
    tl.store(out + row * columns + offsets, to_fp8(values, scale[:, None]), mask=inside)


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total_out, out_scale, hidden, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One row for each program. With a residual, the kernel normalises ``total_out = x + residual``, rounded."""
    follow(OVERLAPS)
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
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    normed = ((exact * scale).to(factor.dtype) * factor).to(values.dtype)
    store_result(out + row * hidden + offsets, normed, inside, out_scale)


@triton.jit
def rope_and_write_kernel(
    qkv, q_out, q_norm, k_norm, rotary, positions, slots, block_table, pool_layer, kv_scales,
    eps, table_width, padding_slot, block_stride, kv_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, ROTARY_BY_TOKEN: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Applies RoPE and writes KV: ``BLOCK_HEADS`` heads of one token for each program.

    Query heads go to ``q_out``; key and value heads go to the pool, addressed by its strides. ``pool_layer`` is
    ``pool[:, layer]``; a head of a token is ``HEAD_DIM`` adjacent elements. ``kv_scales``: the layer's two float32
    scales of a float8 pool, else None. ``rotary`` has one row for each position or, with ``ROTARY_BY_TOKEN``, one for
    each token of the forward.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    offsets = tl.arange(0, BLOCK)[None, :]
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    in_half = offsets < half
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads) * HEAD_DIM + offsets
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        of_query = is_query & in_half
        of_key = (heads >= NUM_HEADS) & in_half
        low = tl.load(q_norm + offsets, mask=of_query, other=0.0) + tl.load(k_norm + offsets, mask=of_key, other=0.0)
        high = tl.load(q_norm + half + offsets, mask=of_query, other=0.0)
        high += tl.load(k_norm + half + offsets, mask=of_key, other=0.0)
        a = ((a * scale).to(low.dtype) * low).to(first.dtype).to(tl.float32)
        b = ((b * scale).to(low.dtype) * high).to(first.dtype).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    angles = rotary + (token if ROTARY_BY_TOKEN else position) * HEAD_DIM + offsets
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + half, mask=in_half, other=0.0)
    first = tl.where(is_value, first, (a * cos - b * sin).to(first.dtype))
    second = tl.where(is_value, second, (b * cos + a * sin).to(second.dtype))

    target = q_out + (token * NUM_HEADS + heads) * HEAD_DIM + offsets
    tl.store(target, first, mask=is_query & inside)
    tl.store(target + half, second, mask=is_query & inside)
    slot = tl.load(slots + token).to(tl.int64)
    writes = (slot != padding_slot) & inside & (heads >= NUM_HEADS)
    block = tl.load(block_table + slot * table_width + position // TOKENS_PER_BLOCK).to(tl.int64)
    kv_head = tl.where(is_value, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    cell = pool_layer + block * block_stride + (position % TOKENS_PER_BLOCK) * token_stride
    cell += is_value.to(tl.int32) * kv_stride + kv_head * head_stride + offsets
    if kv_scales is not None:
        scale = tl.load(kv_scales + is_value.to(tl.int32))
        tl.store(cell, to_fp8(first, scale), mask=writes)
        tl.store(cell + half, to_fp8(second, scale), mask=writes)
    else:
        tl.store(cell, first.to(pool_layer.dtype.element_ty), mask=writes)
        tl.store(cell + half, second.to(pool_layer.dtype.element_ty), mask=writes)


@triton.jit
def gate_kernel(gate_up, out, out_scale, intermediate, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up``, or with GELU's tanh approximation: one block of one row for each program.

    The activation in float32, rounded before the multiplication like torch. The approximation,
    ``0.5 * x * (1 + tanh(u))``, equals ``x * sigmoid(2 * u)``.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < intermediate
    gate = tl.load(gate_up + row * 2 * intermediate + offsets, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * intermediate + offsets, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    slope = exact
    if GELU:
        slope = 1.5957691216057308 * (exact + 0.044715 * exact * exact * exact)  # 2 * sqrt(2 / pi)
    activated = (exact / (1.0 + tl.exp(-slope))).to(gate.dtype)
    store_result(out + row * intermediate + offsets, activated * up, inside, out_scale)


@triton.jit
def to_fp8_kernel(x, out, scale, count, BLOCK: tl.constexpr):
    """``x / scale`` in float8_e4m3fn, one block of adjacent elements for each program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    store_result(out + offsets, tl.load(x + offsets, mask=inside, other=0.0), inside, scale)

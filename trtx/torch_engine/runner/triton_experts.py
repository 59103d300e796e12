"""Triton kernels for mixtures of experts: routing, the matmuls of each token's experts, and their weighted sum.

The (token, expert) *pairs* of a forward are sorted by expert, and a tile is some pairs of one expert. A program finds
its tile from the experts' ends alone, on the device, so that the launch has one shape for any routing and a CUDA graph
can hold it. Only weights of experts with pairs are read.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits, experts, shares, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALIZES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Writes one token's ``experts`` [n, PER_TOKEN] int32 and their ``shares`` float32, rounded to the logits' dtype.

    Of experts with equal probabilities the first ones win. A padding row may hold NaN, which must not lead to an expert
    that does not exist.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_EXPERTS)
    places = tl.arange(0, BLOCK_PER_TOKEN)
    values = tl.load(logits + row * EXPERTS + index, mask=index < EXPERTS, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 0))
    left = tl.where(index < EXPERTS, powers / tl.sum(powers, 0), -1.0)
    picked = tl.zeros((BLOCK_PER_TOKEN,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        expert = tl.minimum(tl.min(tl.where(left == best, index, EXPERTS), 0), EXPERTS - 1)
        tl.store(experts + row * PER_TOKEN + place, expert)
        picked = tl.where(places == place, best, picked)
        left = tl.where(index == expert, -1.0, left)
    if NORMALIZES:
        picked = picked / tl.sum(picked, 0)
    rounded = picked.to(logits.dtype.element_ty).to(tl.float32)
    tl.store(shares + row * PER_TOKEN + places, rounded, mask=places < PER_TOKEN)


@triton.jit
def _tile_of(ends, tile, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Returns (expert, its first pair in this tile, the end of its pairs). The expert is EXPERTS or more: no tile."""
    index = tl.arange(0, BLOCK_EXPERTS)
    inside = index < EXPERTS
    end = tl.load(ends + index, mask=inside, other=0)
    begin = tl.load(ends + index - 1, mask=inside & (index > 0), other=0)
    tiles = tl.where(inside, (end - begin + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(last <= tile, 1, 0), 0)
    is_own = index == expert
    first_tile = tl.sum(tl.where(is_own, last - tiles, 0), 0)
    row = tl.sum(tl.where(is_own, begin, 0), 0) + (tile - first_tile) * BLOCK_ROWS
    return expert, row, tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def gated_experts_kernel(
    x, weight, places, ends, out, intermediate, width,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes ``silu(gate) * up`` of each pair into ``out`` [pairs, intermediate], in the order of ``places``.

    ``x`` [n, width]; ``weight`` [EXPERTS, 2 * intermediate, width]: rows of gate, then of up.
    """
    expert, row, end = _tile_of(ends, tl.program_id(0), EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS)
    if expert >= EXPERTS:
        return
    rows = row + tl.arange(0, BLOCK_ROWS)
    tokens = tl.load(places + rows, mask=rows < end, other=0) // PER_TOKEN
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    steps = tl.arange(0, BLOCK_WIDTH)
    left = x + tokens.to(tl.int64)[:, None] * width
    right = weight + (expert.to(tl.int64) * 2 * intermediate + outputs)[None, :] * width
    gate = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        columns = start + steps
        a = tl.load(left + columns[None, :], mask=(rows < end)[:, None] & (columns < width)[None, :], other=0.0)
        mask = (outputs < intermediate)[None, :] & (columns < width)[:, None]
        gate = tl.dot(a, tl.load(right + columns[:, None], mask=mask, other=0.0), gate, input_precision="ieee")
        b = tl.load(right + intermediate * width + columns[:, None], mask=mask, other=0.0)
        up = tl.dot(a, b, up, input_precision="ieee")
    kept = gate.to(out.dtype.element_ty).to(tl.float32)
    gated = (kept / (1.0 + tl.exp(-kept))).to(out.dtype.element_ty) * up.to(out.dtype.element_ty)
    inside = (rows < end)[:, None] & (outputs < intermediate)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * intermediate + outputs[None, :], gated, mask=inside)


@triton.jit
def down_experts_kernel(
    x, weight, places, ends, out, num_outputs, width,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the down projection of each pair into ``out`` [pairs, num_outputs], in the order of tokens.

    ``x`` [pairs, width], in the order of ``places``; ``weight`` [EXPERTS, num_outputs, width].
    """
    expert, row, end = _tile_of(ends, tl.program_id(0), EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS)
    if expert >= EXPERTS:
        return
    rows = row + tl.arange(0, BLOCK_ROWS)
    pairs = tl.load(places + rows, mask=rows < end, other=0)
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    steps = tl.arange(0, BLOCK_WIDTH)
    left = x + rows.to(tl.int64)[:, None] * width
    right = weight + (expert.to(tl.int64) * num_outputs + outputs)[None, :] * width
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        columns = start + steps
        a = tl.load(left + columns[None, :], mask=(rows < end)[:, None] & (columns < width)[None, :], other=0.0)
        mask = (outputs < num_outputs)[None, :] & (columns < width)[:, None]
        sums = tl.dot(a, tl.load(right + columns[:, None], mask=mask, other=0.0), sums, input_precision="ieee")
    inside = (rows < end)[:, None] & (outputs < num_outputs)[None, :]
    place = pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_kernel(outputs, shares, out, hidden, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Adds one token's ``outputs`` [n, PER_TOKEN, hidden] with the weights ``shares``, best expert first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + place
        total += tl.load(outputs + pair * hidden + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(
            shares + pair
        )
    tl.store(out + row * hidden + columns, total.to(out.dtype.element_ty), mask=inside)

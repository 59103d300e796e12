"""Triton kernels for mixtures of experts: routing, the matmuls of each token's experts, and their weighted sum.

A *pair* is a token and one of its experts. The pairs of a forward are sorted by expert into *tiles*: some pairs of one
expert, padded to a fixed number. The device makes the list of tiles, so that the launches have one shape for any
routing and a CUDA graph can hold them. Only weights of experts with pairs are read.

A pair's result depends only on its token: a tile's size affects no sum, and each token's experts are added in the order
of their probabilities.

With ``OVERLAPS`` a launch begins before the previous one ends (programmatic dependent launch). The programs of the down
projection then prefetch their weights while those of the gate still run: the list of tiles is complete by then.

The padded list follows the fused experts of vLLM; the code does not.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trtx.torch_engine.triton_pointwise import follow, store_result


@triton.jit
def route_kernel(
    logits, experts, shares, x, rounded, scale, load, slots, padding_slot,
    EXPERTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr,
    PER_TOKEN: tl.constexpr, NORMALIZES: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_PER_TOKEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Writes one token's ``experts`` [n, PER_TOKEN] int32 and their ``shares`` float32, rounded to the logits' dtype.

    ``experts`` are indices into those that this rank holds: HELD of the model's EXPERTS, from FIRST on. A token's other
    experts become HELD, with a share of 0. If ``load`` [EXPERTS] int32 is given, it counts the row for each of its
    experts, unless ``slots`` [n] has the padding slot there.
    Of experts with equal probabilities the first ones win. A padding row may hold NaN, which must not lead to an expert
    that does not exist. If ``scale`` is given, ``x`` [n, HIDDEN] is rounded to float8 into ``rounded``.
    """
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_EXPERTS)
    places = tl.arange(0, BLOCK_PER_TOKEN)
    values = tl.load(logits + row * EXPERTS + index, mask=index < EXPERTS, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 0))
    left = tl.where(index < EXPERTS, powers / tl.sum(powers, 0), -1.0)
    picked = tl.zeros((BLOCK_PER_TOKEN,), tl.float32)
    is_held = tl.zeros((BLOCK_PER_TOKEN,), tl.int32)
    for place in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        expert = tl.minimum(tl.min(tl.where(left == best, index, EXPERTS), 0), EXPERTS - 1)
        own = tl.where((expert >= FIRST) & (expert < FIRST + HELD), expert - FIRST, HELD)
        tl.store(experts + row * PER_TOKEN + place, own)
        is_held = tl.where(places == place, (own < HELD).to(tl.int32), is_held)
        picked = tl.where(places == place, best, picked)
        left = tl.where(index == expert, -1.0, left)
    if NORMALIZES:
        picked = picked / tl.sum(picked, 0)
    if load is not None:
        is_token = tl.load(slots + row) != padding_slot
        tl.atomic_add(load + index, 1, mask=(left == -1.0) & (index < EXPERTS) & is_token, sem="relaxed")
    shared = picked.to(logits.dtype.element_ty).to(tl.float32)
    if HELD < EXPERTS:
        shared = tl.where(is_held == 1, shared, 0.0)
    tl.store(shares + row * PER_TOKEN + places, shared, mask=places < PER_TOKEN)
    if scale is not None:
        for start in range(0, HIDDEN, BLOCK_HIDDEN):
            columns = start + tl.arange(0, BLOCK_HIDDEN)
            inside = columns < HIDDEN
            exact = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0)
            store_result(rounded + row * HIDDEN + columns, exact, inside, scale)


@triton.jit(do_not_specialize=["num_pairs"])
def order_pairs_kernel(
    experts, pairs, tile_experts, num_tiles, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Sorts pairs by expert, one expert for each program; the pairs of an expert keep their order.

    ``experts`` [num_pairs]; pairs with expert EXPERTS are left out, because another rank holds their expert. ``pairs``
    [tiles, BLOCK_ROWS]: the pairs of each tile, ``num_pairs`` for padding. ``tile_experts`` [tiles]: their experts.
    ``num_tiles`` [1]: the tiles in use.
    """
    follow(OVERLAPS)
    own = tl.program_id(0)
    index = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    for start in range(0, num_pairs, BLOCK_PAIRS):
        at = start + tl.arange(0, BLOCK_PAIRS)
        inside = at < num_pairs
        found = tl.load(experts + at, mask=inside, other=EXPERTS)
        counts += tl.histogram(tl.where(found < EXPERTS, found, 0), BLOCK_EXPERTS, mask=found < EXPERTS)
    tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.sum(tl.where(index < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(index == own, tiles, 0), 0)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    for start in range(0, own_tiles, BLOCK_EXPERTS):
        tl.store(tile_experts + first + start + index, own + index * 0, mask=start + index < own_tiles)
    done = tl.sum(tl.where(index == own, counts, 0), 0) * 0
    for start in range(0, num_pairs, BLOCK_PAIRS):
        at = start + tl.arange(0, BLOCK_PAIRS)
        is_own = (tl.load(experts + at, mask=at < num_pairs, other=EXPERTS) == own).to(tl.int32)
        places = first * BLOCK_ROWS + done + tl.cumsum(is_own, 0) - 1
        tl.store(pairs + places, at, mask=is_own == 1)
        done += tl.sum(is_own, 0)
    padding = done + tl.arange(0, BLOCK_ROWS)
    tl.store(pairs + first * BLOCK_ROWS + padding, num_pairs + padding * 0, mask=padding < own_tiles * BLOCK_ROWS)


@triton.jit
def _weights(
    rows, outputs, columns,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads a part [BLOCK_OUTPUTS, BLOCK_WIDTH] of a weight. ``rows`` [BLOCK_OUTPUTS, 1]: pointers to its rows."""
    if OUTPUTS % BLOCK_OUTPUTS == 0 and WIDTH % BLOCK_WIDTH == 0:
        return tl.load(rows + columns[None, :], eviction_policy="evict_first")
    else:
        inside = (outputs < OUTPUTS)[:, None] & (columns < WIDTH)[None, :]
        return tl.load(rows + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _rows(x, is_row, columns, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Loads a part [BLOCK_ROWS, BLOCK_WIDTH] of x. ``x`` [BLOCK_ROWS, 1]: pointers to its rows."""
    if WIDTH % BLOCK_WIDTH == 0:
        return tl.load(x + columns[None, :], mask=is_row[:, None], other=0.0)
    else:
        return tl.load(x + columns[None, :], mask=is_row[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _zeros(BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr):
    if SWAPPED:
        return tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    else:
        return tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)


@triton.jit
def _multiply(sums, a, b, SWAPPED: tl.constexpr):
    """Adds ``a @ b.T`` to ``sums`` [BLOCK_ROWS, BLOCK_OUTPUTS], or its transpose if SWAPPED: to ``sums.T``."""
    if SWAPPED:
        return tl.dot(b, tl.trans(a), sums, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_pairs"])
def gated_experts_kernel(
    x, weight, bias, scales, out_scale, pairs, tile_experts, num_tiles, out, num_pairs,
    PER_TOKEN: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    SWAPPED: tl.constexpr, OVERLAPS: tl.constexpr, THREADS: tl.constexpr,
    CLAMPED: tl.constexpr = False, ALPHA: tl.constexpr = 1.0, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """Writes ``silu(gate) * up`` of each pair into ``out`` [num_pairs, OUTPUTS].

    Gate, up and SiLU are rounded to DTYPE, like separate results. ``x`` [n, WIDTH]; ``weight`` [experts, 2 * OUTPUTS,
    WIDTH]: rows of gate, then of up; ``bias`` [experts, 2 * OUTPUTS]: if given, theirs. ``scales`` [experts, 2]: if
    given, their factors. ``out_scale``: if given, ``out`` is float8. CLAMPED: instead of SiLU, the activation of
    :class:`trtx.checkpoint.experts.GateClamp`, computed in float32 and rounded once.
    """
    if OVERLAPS:
        # In this order: the down projection, once launched, relies on the list of tiles.
        gdc_wait()
        gdc_launch_dependents()
    OUTPUT_TILES: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    tile = tl.program_id(0) // OUTPUT_TILES
    expert = tl.load(tile_experts + tile)
    own = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    if tile >= tl.load(num_tiles):
        return
    is_row = own < num_pairs
    outputs = tl.program_id(0) % OUTPUT_TILES * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    left = x + (tl.where(is_row, own, 0) // PER_TOKEN).to(tl.int64)[:, None] * WIDTH
    right = weight + (expert.to(tl.int64) * 2 * OUTPUTS + outputs)[:, None] * WIDTH
    gate = _zeros(BLOCK_ROWS, BLOCK_OUTPUTS, SWAPPED)
    up = _zeros(BLOCK_ROWS, BLOCK_OUTPUTS, SWAPPED)
    for start in range(0, WIDTH, BLOCK_WIDTH):
        columns = start + tl.arange(0, BLOCK_WIDTH)
        # The weights first: their addresses are known earlier.
        b = _weights(right, outputs, columns, OUTPUTS, WIDTH, BLOCK_OUTPUTS, BLOCK_WIDTH)
        c = _weights(right + OUTPUTS * WIDTH, outputs, columns, OUTPUTS, WIDTH, BLOCK_OUTPUTS, BLOCK_WIDTH)
        a = _rows(left, is_row, columns, WIDTH, BLOCK_WIDTH)
        gate = _multiply(gate, a, b, SWAPPED)
        up = _multiply(up, a, c, SWAPPED)
    if SWAPPED:
        gate = tl.trans(gate)
        up = tl.trans(up)
    if scales is not None:
        gate *= tl.load(scales + expert * 2)
        up *= tl.load(scales + expert * 2 + 1)
    if bias is not None:
        biases = bias + expert * 2 * OUTPUTS + outputs
        gate += tl.load(biases, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + OUTPUTS, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    exact = gate.to(DTYPE).to(tl.float32)
    if CLAMPED:
        exact = tl.minimum(exact, LIMIT)
        linear = tl.maximum(tl.minimum(up.to(DTYPE).to(tl.float32), LIMIT), -LIMIT)
        gated = ((linear + 1.0) * (exact / (1.0 + tl.exp(-exact * ALPHA)))).to(DTYPE)
    else:
        gated = (exact / (1.0 + tl.exp(-exact))).to(DTYPE) * up.to(DTYPE)
    inside = is_row[:, None] & (outputs < OUTPUTS)[None, :]
    store_result(out + own.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :], gated, inside, out_scale)


@triton.jit(do_not_specialize=["num_pairs"])
def down_experts_kernel(
    x, weight, bias, scales, pairs, tile_experts, num_tiles, out, num_pairs,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    SWAPPED: tl.constexpr, OVERLAPS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Writes the down projection of each pair into ``out`` [num_pairs, OUTPUTS].

    ``x`` [num_pairs, WIDTH]; ``weight`` [experts, OUTPUTS, WIDTH]; ``bias`` [experts, OUTPUTS]: if given, it is added.
    ``scales`` [experts]: if given, the factors.
    """
    OUTPUT_TILES: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    tile = tl.program_id(0) // OUTPUT_TILES
    expert = tl.load(tile_experts + tile)
    own = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    if tile >= tl.load(num_tiles):
        if OVERLAPS:
            gdc_launch_dependents()
            gdc_wait()  # no program may end before the launch that this one overlaps
        return
    is_row = own < num_pairs
    begin = tl.program_id(0) % OUTPUT_TILES * BLOCK_OUTPUTS
    outputs = begin + tl.arange(0, BLOCK_OUTPUTS)
    if OVERLAPS:
        gdc_launch_dependents()
        # The rows of a tile are adjacent, and each thread prefetches a multiple of 16 bytes.
        PIECE: tl.constexpr = BLOCK_OUTPUTS * WIDTH // THREADS
        PIECE_BYTES: tl.constexpr = PIECE * weight.dtype.element_ty.primitive_bitwidth // 8
        if OUTPUTS % BLOCK_OUTPUTS == 0 and PIECE * THREADS == BLOCK_OUTPUTS * WIDTH and PIECE_BYTES % 16 == 0:
            pieces = weight + (expert.to(tl.int64) * OUTPUTS + begin) * WIDTH + tl.arange(0, THREADS) * PIECE
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
                [pieces.to(tl.int64), tl.zeros((THREADS,), tl.int32) + PIECE_BYTES],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()
    left = x + tl.where(is_row, own, 0).to(tl.int64)[:, None] * WIDTH
    right = weight + (expert.to(tl.int64) * OUTPUTS + outputs)[:, None] * WIDTH
    sums = _zeros(BLOCK_ROWS, BLOCK_OUTPUTS, SWAPPED)
    for start in range(0, WIDTH, BLOCK_WIDTH):
        columns = start + tl.arange(0, BLOCK_WIDTH)
        b = _weights(right, outputs, columns, OUTPUTS, WIDTH, BLOCK_OUTPUTS, BLOCK_WIDTH)
        a = _rows(left, is_row, columns, WIDTH, BLOCK_WIDTH)
        sums = _multiply(sums, a, b, SWAPPED)
    if SWAPPED:
        sums = tl.trans(sums)
    if scales is not None:
        sums *= tl.load(scales + expert)
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + outputs, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    inside = is_row[:, None] & (outputs < OUTPUTS)[None, :]
    place = own.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_kernel(
    outputs, shares, out, residual, hidden, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PARTIAL: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Adds one token's ``outputs`` [n, PER_TOKEN, hidden] with the weights ``shares``, best expert first.

    ``residual`` [n, hidden]: if given, it is added to the rounded sum. PARTIAL: outputs with a share of 0 are
    undefined.
    """
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + place
        share = tl.load(shares + pair)
        defined = inside
        if PARTIAL:
            defined = inside & (tl.zeros((BLOCK,), tl.float32) + share > 0.0)
        total += tl.load(outputs + pair * hidden + columns, mask=defined, other=0.0).to(tl.float32) * share
    result = total.to(out.dtype.element_ty)
    if residual is not None:
        other = tl.load(residual + row * hidden + columns, mask=inside, other=0.0)
        result = (result.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * hidden + columns, result, mask=inside)

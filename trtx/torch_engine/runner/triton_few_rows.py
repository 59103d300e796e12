"""Triton kernels for products of few rows, which are as fast as their weight is read: a decode step of a small batch.

A program has some rows of a weight, its *outputs*. One row of x is multiplied element by element, several by tensor
cores. There the columns may be cut into *parts*, each a program's: whoever of a tile's parts is done last adds them up
in their order, so that no order of arrival is in the result. What lies between a layer's products may be part of one:
the norm of a single row (a sum of squares beside the sum, and one factor behind it), ``silu(gate) * up`` of the
outputs, the residual added to them.

With ``OVERLAPS`` a launch does not wait for the one before it (programmatic dependent launch): its programs ask for
their weights, which nobody writes, and wait only then.

Ideas of others, none of their code: a norm's factor behind the product (FlashNorm, arXiv 2407.09577), the last one to
arrive folds (stream-K), weights asked for before the input is there (TensorRT-LLM's use of dependent launches; Hazy
Research's kernel of a whole decoder, which never leaves memory idle).
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch_weights(
    weight, weight_row, begin, end, width, most_columns, BLOCK_OUTPUTS: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Into the L2 cache: the first columns of a program's part, at most ``most_columns``, a piece of a row a thread.

    ``weight_row`` [THREADS]: each thread's row; threads of a row are adjacent.
    """
    PIECES: tl.constexpr = THREADS // BLOCK_OUTPUTS
    piece = tl.minimum(end - begin, most_columns) // PIECES // 8 * 8  # what is asked for is whole 16 bytes
    if piece > 0:
        pointers = weight + weight_row.to(tl.int64) * width + begin + (tl.arange(0, THREADS) % PIECES) * piece
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), tl.zeros((THREADS,), tl.int32) + piece * 2],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def weight_rows_of(index, tile, num_outputs, GATED: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr):
    """(row of the weight, whether there is one) for each of ``index``, numbers in ``[0, BLOCK_OUTPUTS)``.

    ``GATED``: the weight has ``num_outputs`` gates, then as many ups, and a program half of its rows from either.
    """
    if GATED:
        HALF: tl.constexpr = BLOCK_OUTPUTS // 2
        output = tile * HALF + index % HALF
        weight_row = output + index // HALF * num_outputs
    else:
        output = tile * BLOCK_OUTPUTS + index
        weight_row = output
    return weight_row, output < num_outputs


@triton.jit
def begin_early(
    weight, tile, begin, end, num_outputs, width, prefetched,
    GATED: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """What need not wait for the launches before this one; ``gdc_wait`` is to follow."""
    gdc_launch_dependents()
    index = tl.arange(0, THREADS) // (THREADS // BLOCK_OUTPUTS)
    weight_row, known = weight_rows_of(index, tile, num_outputs, GATED, BLOCK_OUTPUTS)
    prefetch_weights(
        weight, tl.where(known, weight_row, 0), begin, end, width, prefetched, BLOCK_OUTPUTS, THREADS
    )  # fmt: skip


@triton.jit
def finish(
    sums, bias, residual, out, tile, num_rows, num_outputs,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """What follows ``sums`` [BLOCK_OUTPUTS, ROWS], rounded where operations of their own would round."""
    rows = tl.arange(0, ROWS)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    index = tl.arange(0, BLOCK_OUTPUTS)
    if bias is not None:
        weight_row, known = weight_rows_of(index, tile, num_outputs, GATED, BLOCK_OUTPUTS)
        sums += tl.load(bias + weight_row, mask=known, other=0.0).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_OUTPUTS // 2
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, ROWS)), (1, 2, 0)))
        exact = gate.to(dtype).to(tl.float32)
        result = (exact / (1.0 + tl.exp(-exact))).to(dtype) * up.to(dtype)
        outputs = (tile * HALF + tl.arange(0, HALF))[:, None]
    else:
        result = sums.to(dtype)
        outputs = (tile * BLOCK_OUTPUTS + index)[:, None]
    places = rows * num_outputs + outputs
    inside = (rows < num_rows) & (outputs < num_outputs)
    if residual is not None:
        other = tl.load(residual + places, mask=inside, other=0.0)
        result = (result.to(tl.float32) + other.to(tl.float32)).to(dtype)
    tl.store(out + places, result, mask=inside)


@triton.jit(do_not_specialize=["prefetched"])
def one_row_kernel(
    x, weight, bias, norm, residual, out, num_outputs, width, eps, prefetched,
    GATED: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, THREADS: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """``out`` [num_outputs] of ``x`` [width], normalised where there is a ``norm`` [width]: BLOCK_OUTPUTS rows of
    ``weight`` a program. ``AHEAD``: the first step's weights are loaded before x is waited for. x and weight have the
    same layout where BLOCK_WIDTH is at least eight columns a thread."""
    tile = tl.program_id(0)
    weight_row, known = weight_rows_of(tl.arange(0, BLOCK_OUTPUTS), tile, num_outputs, GATED, BLOCK_OUTPUTS)
    rows = weight + weight_row.to(tl.int64)[:, None] * width
    steps = tl.arange(0, BLOCK_WIDTH)[None, :]
    begin = 0
    if AHEAD:
        begin = BLOCK_WIDTH
        first_weights = tl.load(rows + steps, mask=known[:, None] & (steps < width), other=0.0)
    if OVERLAPS:
        begin_early(weight, tile, begin, width, num_outputs, width, prefetched, GATED, BLOCK_OUTPUTS, THREADS)
        gdc_wait()
    products = tl.zeros((BLOCK_OUTPUTS, BLOCK_WIDTH), tl.float32)
    squares = tl.zeros((1, BLOCK_WIDTH), tl.float32)
    if AHEAD:
        first_values = tl.load(x + steps, mask=steps < width, other=0.0)
        if norm is not None:
            first_norm = tl.load(norm + steps, mask=steps < width, other=0.0)
    for start in tl.range(begin, width, BLOCK_WIDTH, num_stages=STAGES):
        columns = start + steps
        inside = columns < width
        weights = tl.load(rows + columns, mask=known[:, None] & inside, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
        products += weights.to(tl.float32) * values
    if AHEAD:  # last, so that nothing waits for it before the other steps are under way
        values = first_values.to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= first_norm.to(tl.float32)
        products += first_weights.to(tl.float32) * values
    sums = tl.sum(products, axis=1)[:, None]
    if norm is not None:
        sums *= tl.rsqrt(tl.sum(squares, axis=1)[:, None] / width + eps)
    finish(sums, bias, residual, out, tile, 1, num_outputs, GATED, 1, BLOCK_OUTPUTS)


@triton.jit(do_not_specialize=["num_rows", "parts", "prefetched"])
def few_rows_kernel(
    x, weight, bias, residual, out, partial, arrived,
    num_rows, num_outputs, width, parts, part_width, prefetched,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr, OVERLAPS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """``out`` [num_rows, num_outputs] of ``x`` [num_rows, width]: a part of BLOCK_OUTPUTS rows of ``weight`` a program.

    ``partial`` [tiles, parts, BLOCK_OUTPUTS, ROWS] float32 and ``arrived`` [tiles] int32 (zeros before and after) are
    used where ``parts`` is more than 1.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * part_width
    end = tl.minimum(begin + part_width, width)
    if OVERLAPS:
        begin_early(weight, tile, begin, end, num_outputs, width, prefetched, GATED, BLOCK_OUTPUTS, THREADS)
        gdc_wait()
    index = tl.arange(0, BLOCK_OUTPUTS)
    weight_row, known = weight_rows_of(index, tile, num_outputs, GATED, BLOCK_OUTPUTS)
    right = weight + weight_row.to(tl.int64)[:, None] * width
    rows = tl.arange(0, ROWS)
    left = x + rows[:, None] * width
    sums = tl.zeros((ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in tl.range(begin, end, BLOCK_WIDTH, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_WIDTH)[None, :]
        inside = columns < end
        weights = tl.load(right + columns, mask=known[:, None] & inside, other=0.0, eviction_policy="evict_first")
        values = tl.load(left + columns, mask=(rows < num_rows)[:, None] & inside, other=0.0)
        sums = tl.dot(values, tl.trans(weights), sums)
    sums = tl.trans(sums)
    if parts == 1:
        finish(sums, bias, residual, out, tile, num_rows, num_outputs, GATED, ROWS, BLOCK_OUTPUTS)
    else:
        SIZE: tl.constexpr = BLOCK_OUTPUTS * ROWS
        places = partial + tile * parts * SIZE + index[:, None] * ROWS + rows[None, :]
        tl.store(places + part * SIZE, sums)
        # All stores of this program come before its arrival, and the loads below after everybody's.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == parts - 1:
            tl.store(arrived + tile, 0)  # for the next product
            sums = tl.zeros((BLOCK_OUTPUTS, ROWS), tl.float32)
            for other in tl.range(0, parts, loop_unroll_factor=4):
                # Other processors wrote them: not from what this one's own cache has kept.
                sums += tl.load(places + other * SIZE, cache_modifier=".cg")
            finish(sums, bias, residual, out, tile, num_rows, num_outputs, GATED, ROWS, BLOCK_OUTPUTS)

"""Triton kernels for skinny GEMMs, whose speed is that of reading the weight: decode steps of small batches.

A program computes some rows of the weight, its *outputs*. A single row of x is multiplied element-wise; several rows
use tensor cores. In the latter case the columns may be split into *parts* (split-K), one for each program; the program
that finishes a tile last adds the parts in their order, so that the result does not depend on the order of arrival. A
matmul may be fused with the operations between a layer's matmuls: the RMSNorm of a single row (a sum of squares next to
the dot product, and one factor after it), ``silu(gate) * up`` of the outputs, and the residual addition.

With ``OVERLAPS``, a launch does not wait for the previous one (programmatic dependent launch): its programs prefetch
their weights, which no kernel writes, and only then wait.

The ideas come from others, the code does not: a norm's factor after the matmul (FlashNorm, arXiv 2407.09577), the last
program to arrive folds (stream-K), weights prefetched before the input is ready (TensorRT-LLM's dependent launches;
Hazy Research's whole-decoder kernel, which never leaves memory idle).
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
    """Prefetches a program's first columns, at most ``most_columns``, into the L2 cache, one piece for each thread.

    ``weight_row`` [THREADS]: each thread's row; the threads of one row are adjacent.
    """
    PIECES: tl.constexpr = THREADS // BLOCK_OUTPUTS
    piece = tl.minimum(end - begin, most_columns) // PIECES // 8 * 8  # prefetches are multiples of 16 bytes
    if piece > 0:
        pointers = weight + weight_row.to(tl.int64) * width + begin + (tl.arange(0, THREADS) % PIECES) * piece
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), tl.zeros((THREADS,), tl.int32) + piece * 2],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def weight_rows_of(index, tile, num_outputs, GATED: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr):
    """Returns (row of the weight, whether it exists) for each of ``index``, numbers in ``[0, BLOCK_OUTPUTS)``.

    ``GATED``: the weight has ``num_outputs`` gate rows, then as many up rows, and a program takes half of its rows from
    each.
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
    """Does what need not wait for earlier launches: prefetches weights.

    The caller must call ``gdc_wait`` afterwards.
    """
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
    """Adds bias, gate and residual to ``sums`` [BLOCK_OUTPUTS, ROWS] and stores them.

    Rounds wherever separate operations would round.
    """
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
    OVERLAPS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Single-row matmul: ``out`` [num_outputs] from ``x`` [width].

    A program computes BLOCK_OUTPUTS rows of ``weight``. With ``norm`` [width], x is RMS-normalised. x
    and weight have the same layout if BLOCK_WIDTH is at least eight columns for each thread.
    """
    tile = tl.program_id(0)
    weight_row, known = weight_rows_of(tl.arange(0, BLOCK_OUTPUTS), tile, num_outputs, GATED, BLOCK_OUTPUTS)
    rows = weight + weight_row.to(tl.int64)[:, None] * width
    steps = tl.arange(0, BLOCK_WIDTH)[None, :]
    if OVERLAPS:
        begin_early(weight, tile, 0, width, num_outputs, width, prefetched, GATED, BLOCK_OUTPUTS, THREADS)
        gdc_wait()
    products = tl.zeros((BLOCK_OUTPUTS, BLOCK_WIDTH), tl.float32)
    squares = tl.zeros((1, BLOCK_WIDTH), tl.float32)
    for start in tl.range(0, width, BLOCK_WIDTH, num_stages=STAGES):
        columns = start + steps
        inside = columns < width
        weights = tl.load(rows + columns, mask=known[:, None] & inside, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
        products += weights.to(tl.float32) * values
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
    """Few-row matmul: ``out`` [num_rows, num_outputs] from ``x`` [num_rows, width].

    Each program computes one part of BLOCK_OUTPUTS rows of ``weight``. If ``parts`` is more than 1, it uses ``partial``
    [tiles, parts, BLOCK_OUTPUTS, ROWS] float32 and ``arrived`` [tiles] int32 (zeros before and after).
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
        # All stores of this program come before its arrival; the loads below come after every program's arrival.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == parts - 1:
            tl.store(arrived + tile, 0)  # for the next matmul
            sums = tl.zeros((BLOCK_OUTPUTS, ROWS), tl.float32)
            for other in tl.range(0, parts, loop_unroll_factor=4):
                # Other SMs wrote them: bypass this SM's L1 cache.
                sums += tl.load(places + other * SIZE, cache_modifier=".cg")
            finish(sums, bias, residual, out, tile, num_rows, num_outputs, GATED, ROWS, BLOCK_OUTPUTS)

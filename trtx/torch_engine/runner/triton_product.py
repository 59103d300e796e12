"""A float8 product for few rows of x, where reading the weight is all that takes time: decode at small batches."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_x", "splits"])
def few_rows_product_kernel(
    x, weight, row_scales, bias, out, partial, arrived,
    num_x, rows, columns, share, splits,
    IS_SPLIT: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[x, row] = (sum over columns of x * weight) * row_scales[row] + bias[row]``, all of x in one program.

    ``BLOCK_ROWS`` rows of the weight and ``share`` columns (a multiple of ``BLOCK_COLUMNS``) a program. The weight is
    the left operand: the tensor cores of Hopper take 64 rows of that and as few as 8 of the other, so nothing of them
    is spent on padding x to 64.

    With several ``splits`` of the columns, each program leaves its float32 sums in ``partial``
    [row blocks, splits, BLOCK_ROWS, BLOCK_X], and the last to arrive adds them in their order: the result depends on no
    race, and takes no second kernel. ``arrived`` [row blocks] int32 is zero before and after.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    line = tl.arange(0, BLOCK_X)
    # Rows outside are read as others that are inside, and not stored.
    weight_rows = weight + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * columns
    x_rows = x + tl.minimum(line, num_x - 1)[:, None] * columns
    sums = tl.zeros((BLOCK_ROWS, BLOCK_X), tl.float32)
    end = tl.minimum((split + 1) * share, columns)
    for begin in range(split * share, end, BLOCK_COLUMNS):
        column = begin + tl.arange(0, BLOCK_COLUMNS)
        inside = (column < end)[None, :]
        of_weight = tl.load(weight_rows + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        of_x = tl.load(x_rows + column[None, :], mask=inside, other=0.0)
        sums = tl.dot(of_weight, tl.trans(of_x), sums)

    is_last = True
    if IS_SPLIT:
        cells = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_X + line[None, :]
        mine = partial + (block * splits + split).to(tl.int64) * (BLOCK_ROWS * BLOCK_X)
        tl.store(mine + cells, sums)
        tl.debug_barrier()  # all threads' sums are written before one of them says so
        is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == splits - 1
        if is_last:
            first = partial + (block * splits).to(tl.int64) * (BLOCK_ROWS * BLOCK_X)
            sums = tl.zeros((BLOCK_ROWS, BLOCK_X), tl.float32)
            for other in range(splits):
                # Past the first-level cache, which does not see what other processors write.
                sums += tl.load(first + other * (BLOCK_ROWS * BLOCK_X) + cells, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if is_last:
        in_rows = row < rows
        result = sums * tl.load(row_scales + row, mask=in_rows, other=0.0)[:, None]
        if bias is not None:
            result += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        targets = out + line[:, None].to(tl.int64) * rows + row[None, :]
        stored = (line < num_x)[:, None] & in_rows[None, :]
        tl.store(targets, tl.trans(result).to(out.dtype.element_ty), mask=stored)

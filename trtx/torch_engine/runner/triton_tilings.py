"""Triton kernels for batch-invariant matmuls on any GPU, with a fixed summation order.

The columns of a weight are split into *parts*; their number depends only on the weight's shape. Each part is summed in
steps of one width, and the parts are added one after the other. All tilings do the same additions of the same numbers.
For few rows, each part is a separate program, so that a small matmul fills the GPU, and a second kernel adds the parts;
for many rows, one program computes all parts. Measurements for vLLM on Ada and Hopper show that the tile size changes
no bit as long as the step width stays the same (vllm-project/vllm #27433);
:class:`trtx.torch_engine.runner.invariant_multiplier.InvariantMultiplier` tests it.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtx.torch_engine.runner.fp8 import Quantize

FEW_ROWS = 64
MANY_ROWS = 256
GROUP = 8  # row tiles that share cached weights
_TILE_BYTES = 128  # of a row of x in one step, the width of shared memory's swizzle
_WANTED_PROGRAMS = 256  # for few rows: about two for each SM of a Hopper GPU; the same on other GPUs
_LEAST_PART = 512  # columns: shorter parts cost more in partial sums than they gain
_REDUCE_BLOCK = 1024


@triton.jit
def _sum_part(
    x, weight, x_scales, block_scales, rows, outputs, begin, end, num_rows, num_outputs, width, padded_rows, blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """``x[rows, begin:end] @ weight[outputs, begin:end].T`` in float32, in steps of BLOCK_WIDTH from ``begin`` on.

    With ``block_scales`` [outputs / BLOCK_WIDTH, blocks], a step is one block, and ``x_scales`` are [steps,
    padded_rows].
    """
    steps = tl.arange(0, BLOCK_WIDTH)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    left = x + rows.to(tl.int64)[:, None] * width
    right = weight + outputs.to(tl.int64)[None, :] * width
    for start in range(begin, end, BLOCK_WIDTH):
        columns = start + steps
        inside = columns < width
        a = tl.load(left + columns[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + columns[:, None], mask=(outputs < num_outputs)[None, :] & inside[:, None], other=0.0)
        if block_scales is not None:
            step = start // BLOCK_WIDTH
            of_x = tl.load(x_scales + step * padded_rows + rows, mask=rows < num_rows, other=0.0)
            block = block_scales + outputs // BLOCK_WIDTH * blocks + step
            of_weight = tl.load(block, mask=outputs < num_outputs, other=0.0)
            sums += tl.dot(a, b, input_precision="ieee") * (of_x[:, None] * of_weight[None, :])
        else:
            sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def finish(total, rows, outputs, num_rows, num_outputs, bias, scales, row_scales):
    """Applies the scale of each row of ``total``, and the scale and the bias of each column, if given."""
    inside = outputs < num_outputs
    if row_scales is not None:
        total = total * tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    if scales is not None:
        total = total * tl.load(scales + outputs, mask=inside, other=0.0)[None, :]
    if bias is not None:
        total = total + tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def whole_product_kernel(
    x, weight, bias, scales, row_scales, x_scales, block_scales, out,
    num_rows, num_outputs, width, part_width, padded_rows, blocks,
    PARTS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes one tile of ``out`` [rows, outputs] for each program, part by part.

    ``GROUP`` row tiles share cached weights.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    group = tl.program_id(0) // (GROUP * output_tiles)
    within = tl.program_id(0) % (GROUP * output_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    rows = (group * GROUP + within % size) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = (within // size) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for part in tl.static_range(PARTS):
        total += _sum_part(
            x, weight, x_scales, block_scales, rows, outputs,
            part * part_width, tl.minimum((part + 1) * part_width, width),
            num_rows, num_outputs, width, padded_rows, blocks, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
        )  # fmt: skip
    result = finish(total, rows, outputs, num_rows, num_outputs, bias, scales, row_scales).to(out.dtype.element_ty)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "padded_rows"])
def part_product_kernel(
    x, weight, x_scales, block_scales, partial, num_rows, num_outputs, width, part_width, padded_rows, blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes one part of a tile for each program, into ``partial`` [parts, rows, outputs] float32."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sums = _sum_part(
        x, weight, x_scales, block_scales, rows, outputs,
        part * part_width, tl.minimum((part + 1) * part_width, width),
        num_rows, num_outputs, width, padded_rows, blocks, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
    )  # fmt: skip
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    places = (part * num_rows + rows).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(partial + places, sums, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    partial, bias, scales, row_scales, out, num_rows, num_outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds the parts of ``BLOCK`` columns of one row for each program, in order, from zero like the other kernel."""
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < num_outputs
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_rows + row) * num_outputs + outputs
        total += tl.load(partial + place, mask=inside, other=0.0)[None, :]
    result = finish(total, rows, outputs, num_rows, num_outputs, bias, scales, row_scales).to(out.dtype.element_ty)
    tl.store(out + row * num_outputs + outputs[None, :], result, mask=inside[None, :])


def num_parts(num_outputs: int, width: int) -> int:
    """Number of parts, a power of two: brings few rows to about ``_WANTED_PROGRAMS`` programs.

    Depends only on the shape.
    """
    wanted = _WANTED_PROGRAMS // triton.cdiv(num_outputs, 64)
    most = max(1, width // _LEAST_PART)
    return int(1 << (max(1, min(wanted, most)).bit_length() - 1))


@dataclass(frozen=True, slots=True)
class Division:
    """How a weight's columns are divided: into ``parts`` of ``part_steps`` steps each, the last one maybe of fewer."""

    step: int  # columns
    steps: int
    parts: int
    part_steps: int

    @classmethod
    def of(cls, weight: Tensor) -> Division:
        num_outputs, width = weight.shape
        step = _TILE_BYTES // weight.element_size()
        steps, parts = triton.cdiv(width, step), num_parts(num_outputs, width)
        return cls(step, steps, parts, triton.cdiv(steps, parts))


# Fusion is off in all kernels, so that the tilings round alike: a multiplication and the addition after it round
# separately.
def add_parts(
    partial: Tensor, bias: Tensor | None, scales: Tensor | None, row_scales: Tensor | None, out: Tensor
) -> None:
    """Adds ``partial`` [parts, rows, outputs] into ``out`` [rows, outputs]."""
    parts, num_rows, num_outputs = partial.shape
    add_parts_kernel[(num_rows, triton.cdiv(num_outputs, _REDUCE_BLOCK))](
        partial, bias, scales, row_scales, out, num_rows, num_outputs,
        PARTS=parts, BLOCK=_REDUCE_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonTiling:
    """A :class:`trtx.torch_engine.runner.invariant_multiplier.Tiling`.

    ``scales`` [outputs] float32 multiply the sums. ``quantize``: quantizes x, with a scale for each row, or with
    ``block_scales`` [outputs / FP8_BLOCK, blocks] float32 for each FP8_BLOCK columns of a row.
    """

    rows: int
    scales: Tensor | None = None
    quantize: Quantize | None = None
    block_scales: Tensor | None = None

    def takes(self, weight: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        num_rows, (num_outputs, width) = x.shape[0], weight.shape
        x_scales = None
        if self.quantize is not None:
            x, x_scales = self.quantize(x)
        of_rows, of_groups = (x_scales, None) if self.block_scales is None else (None, x_scales)
        padded, blocks = x.shape[0], 0 if self.block_scales is None else self.block_scales.shape[1]
        division = Division.of(weight)
        step, parts, part_width = division.step, division.parts, division.part_steps * division.step
        if self.rows > FEW_ROWS:
            block_rows, block_outputs = (128, 128) if x.element_size() <= 2 else (64, 64)
            tiles = triton.cdiv(num_rows, block_rows) * triton.cdiv(num_outputs, block_outputs)
            whole_product_kernel[(tiles,)](
                x, weight, bias, self.scales, of_rows, of_groups, self.block_scales, out,
                num_rows, num_outputs, width, part_width, padded, blocks,
                PARTS=parts, GROUP=GROUP, BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs, BLOCK_WIDTH=step,
                num_warps=8, num_stages=3, enable_fp_fusion=False,
            )  # fmt: skip
            return
        partial = torch.empty(parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        part_product_kernel[(triton.cdiv(num_outputs, 64), parts, triton.cdiv(num_rows, 64))](
            x, weight, of_groups, self.block_scales, partial,
            num_rows, num_outputs, width, part_width, padded, blocks,
            BLOCK_ROWS=64, BLOCK_OUTPUTS=64, BLOCK_WIDTH=step, num_warps=4, num_stages=4, enable_fp_fusion=False,
        )  # fmt: skip
        add_parts(partial, bias, self.scales, of_rows, out)

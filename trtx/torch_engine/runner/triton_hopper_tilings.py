"""Triton kernels for batch-invariant matmuls of more than a few rows on Hopper.

They do the additions of :mod:`triton_tilings`, faster: the tensor memory accelerator (TMA) copies whole tiles and fills
what lies outside of a matrix with zeros, so that the loop has no masks. It needs rows of a multiple of 16 bytes, and
numbers of 8 or 16 bits; for others there is no tiling here.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trtx.torch_engine.runner.fp8 import Quantize
from trtx.torch_engine.runner.triton_tilings import GROUP, Division, add_parts, finish

_ALIGNMENT = 16  # bytes, of a matrix and of each of its rows
_CAPABILITY = 9  # the tiles were chosen for Hopper's shared memory and registers
_FEW_PARTS = 2  # a weight of more has so few outputs that whole tiles would not fill the GPU


@triton.jit
def _sum_steps(
    x, weight, row, output, begin, end,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums of the tile at (row, output) of two tensor descriptors over the steps ``[begin, end)``, in float32."""
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for step in tl.range(begin, end):
        a = x.load([row, step * BLOCK_WIDTH])
        b = weight.load([output, step * BLOCK_WIDTH])
        sums = tl.dot(a, b.T, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
    SPLITS: tl.constexpr, HAS_ONE_PART: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``out`` [rows, outputs] for each program. ``x`` and ``weight`` are tensor descriptors.

    With SPLITS, a program computes one part of a tile, and ``out`` is [parts, rows, outputs] float32. All tiles of a
    part come before those of the next. ``GROUP`` row tiles share cached weights.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    part = tl.program_id(0) // (row_tiles * output_tiles)
    tile = tl.program_id(0) % (row_tiles * output_tiles)
    group = tile // (GROUP * output_tiles)
    within = tile % (GROUP * output_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + within % size) * BLOCK_ROWS
    output = (within // size) * BLOCK_OUTPUTS
    if SPLITS or HAS_ONE_PART:
        total = _sum_steps(
            x, weight, row, output, part * part_steps, tl.minimum((part + 1) * part_steps, steps),
            BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        for one in tl.range(0, parts):
            total += _sum_steps(
                x, weight, row, output, one * part_steps, tl.minimum((one + 1) * part_steps, steps),
                BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
            )  # fmt: skip
    rows = row + tl.arange(0, BLOCK_ROWS)
    outputs = output + tl.arange(0, BLOCK_OUTPUTS)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    places = (part * num_rows + rows).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    if not SPLITS:
        total = finish(total, rows, outputs, num_rows, num_outputs, bias, scales, row_scales)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class HopperTile:
    """What one program of ``tile_kernel`` computes, and with what.

    ``splits``: a program computes one part of the tile, as for few rows, and a second kernel adds the parts.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    splits: bool = False


# (rows, tile for weights of few parts, tile for those of more): docs/performance-notes.md, "The same bits in any batch"
_WHOLE = HopperTile(128, 128, 8, 5)
HOPPER_TILES = (
    (256, _WHOLE, HopperTile(128, 256, 8, 4, splits=True)),
    (512, _WHOLE, _WHOLE),
)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """A :class:`trtx.torch_engine.runner.invariant_multiplier.Tiling` whose loads the TMA does.

    ``of_few``: the tile for weights of at most ``_FEW_PARTS`` parts; ``of_more``: for other weights. ``scales``
    [outputs] float32 multiply the sums. ``quantize``: quantizes x, with a scale for each row.
    """

    rows: int
    of_few: HopperTile
    of_more: HopperTile
    scales: Tensor | None = None
    quantize: Quantize | None = None

    def takes(self, weight: Tensor) -> bool:
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] != _CAPABILITY:
            return False
        row_bytes = weight.shape[1] * weight.element_size()
        is_aligned = row_bytes % _ALIGNMENT == 0 and weight.data_ptr() % _ALIGNMENT == 0
        return weight.element_size() <= 2 and is_aligned

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        row_scales = None
        if self.quantize is not None:
            x, row_scales = self.quantize(x)
        if x.data_ptr() % _ALIGNMENT:
            x = x.clone()
        num_rows, num_outputs = out.shape
        division = Division.of(weight)
        tile = self.of_few if division.parts <= _FEW_PARTS else self.of_more
        programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
        sums = out
        if tile.splits:
            programs *= division.parts
            sums = torch.empty(division.parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        tile_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [tile.rows, division.step]),
            TensorDescriptor.from_tensor(weight, [tile.outputs, division.step]),
            bias, self.scales, row_scales, sums, num_rows, num_outputs,
            division.parts, division.steps, division.part_steps,
            SPLITS=tile.splits, HAS_ONE_PART=division.parts == 1, GROUP=GROUP,
            BLOCK_ROWS=tile.rows, BLOCK_OUTPUTS=tile.outputs, BLOCK_WIDTH=division.step,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
        if tile.splits:
            add_parts(sums, bias, self.scales, row_scales, out)

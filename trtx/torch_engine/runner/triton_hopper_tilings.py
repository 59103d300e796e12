"""Triton kernels for batch-invariant matmuls of more than a few rows on Hopper.

They do the additions of :mod:`triton_tilings`, faster: the tensor memory accelerator (TMA) copies whole tiles and fills
what lies outside of a matrix with zeros, so that the loop has no masks. It needs rows of a multiple of 16 bytes, and
numbers of 8 or 16 bits; for others there is no tiling here.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trtx.torch_engine.runner.fp8 import Quantize
from trtx.torch_engine.runner.triton_tilings import GROUP, Division, add_parts, finish

_ALIGNMENT = 16  # bytes, of a matrix and of each of its rows
_CAPABILITY = 9  # the tiles were chosen for Hopper's shared memory and registers
_INTERPRETED = 2  # processors of a GPU that Triton's interpreter acts out: each program has several items


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


@triton.jit
def _compute_item(
    item, x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
    SPLITS: tl.constexpr, HAS_ONE_PART: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``out`` [rows, outputs]; with SPLITS one part of it, ``out`` [parts, rows, outputs] float32.

    All tiles of a part come before those of the next. ``GROUP`` row tiles share cached weights.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    part = item // (row_tiles * output_tiles)
    tile = item % (row_tiles * output_tiles)
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


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
    SPLITS: tl.constexpr, HAS_ONE_PART: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes one item for each program. ``x`` and ``weight`` are tensor descriptors."""
    _compute_item(
        tl.program_id(0), x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
        SPLITS, HAS_ONE_PART, GROUP, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def persistent_tile_kernel(
    x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
    SPLITS: tl.constexpr, HAS_ONE_PART: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """As ``tile_kernel``, but a program computes several items, and one of its warps loads ahead of the others.

    It loads the next part's or item's tiles while the others add a part or store an item.
    """
    items = tl.cdiv(num_rows, BLOCK_ROWS) * tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    if SPLITS:
        items *= parts
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), warp_specialize=True):
        _compute_item(
            item, x, weight, bias, scales, row_scales, out, num_rows, num_outputs, parts, steps, part_steps,
            SPLITS, HAS_ONE_PART, GROUP, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """What one item of a Hopper kernel computes, and with what.

    ``is_persistent``: by ``persistent_tile_kernel``. ``warps`` is 4 then, and the compiler makes three groups of them:
    one loads, and each of the others multiplies half of the rows. ``splits``: each part is an item of its own, as for
    few rows.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    is_persistent: bool = False
    splits: bool = False


# (rows, tile for weights of one part, tile for those of several)
HOPPER_TILES = (
    (128, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3, splits=True)),
    (256, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3, splits=True)),
    (512, Tile(128, 256, 4, 4, is_persistent=True), Tile(128, 128, 4, 6, is_persistent=True)),
)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """A :class:`trtx.torch_engine.runner.invariant_multiplier.Tiling` whose loads the TMA does.

    A program that computes several parts needs registers for two tiles of sums, so ``of_parts`` is smaller than
    ``of_one``, the tile for weights of a single part. ``scales`` [outputs] float32 multiply the sums. ``quantize``:
    quantizes x, with a scale for each row.
    """

    rows: int
    of_one: Tile
    of_parts: Tile
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
        tile = self.of_one if division.parts == 1 else self.of_parts
        items = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
        sums = out
        if tile.splits:
            items *= division.parts
            sums = torch.empty(division.parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        kernel, programs = tile_kernel, items
        if tile.is_persistent:
            kernel, programs = persistent_tile_kernel, min(items, _num_processors(x.device))
        kernel[(programs,)](
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


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED

"""Batch-invariant matmuls on a GPU: Triton kernels with a fixed summation order.

The columns of a weight are split into *parts*; their number depends only on the weight's shape. Each part is summed in
steps of one width, and the parts are added one after the other. All tilings do the same additions of the same numbers.
For few rows, each part is a separate program, so that a small matmul fills the GPU, and a second kernel adds the parts;
for many rows, one program computes all parts. Measurements for vLLM on Ada and Hopper show that the tile size changes
no bit as long as the step width stays the same (vllm-project/vllm #27433); :class:`InvariantMultiplier` tests it.

:class:`TritonTiling` runs on any GPU and for any shape. On Hopper, :class:`HopperTiling` is faster for more rows: the
tensor memory accelerator (TMA) copies whole tiles and fills what lies outside of a matrix with zeros, so that the loop
has no masks. It needs rows of a multiple of 16 bytes, and numbers of 8 or 16 bits.
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

from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier

_FEW_ROWS = 64
_MANY_ROWS = 256
_TILE_BYTES = 128  # of a row of x in one step, the width of shared memory's swizzle
_WANTED_PROGRAMS = 256  # for few rows: about two for each SM of a Hopper GPU; the same on other GPUs
_LEAST_PART = 512  # columns: shorter parts cost more in partial sums than they gain
_REDUCE_BLOCK = 1024
_GROUP = 8  # row tiles that share cached weights
_INTERPRETED = 2  # processors of a GPU that Triton's interpreter acts out: each program has several items
_TMA_ALIGNMENT = 16  # bytes, of a matrix and of each of its rows
_HOPPER = 9  # compute capability: the tiles were chosen for its shared memory and registers


@triton.jit
def _sum_part(
    x, weight, rows, outputs, begin, end, num_rows, num_outputs, width,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """``x[rows, begin:end] @ weight[outputs, begin:end].T`` in float32, in steps of BLOCK_WIDTH from ``begin`` on."""
    steps = tl.arange(0, BLOCK_WIDTH)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    left = x + rows.to(tl.int64)[:, None] * width
    right = weight + outputs.to(tl.int64)[None, :] * width
    for start in range(begin, end, BLOCK_WIDTH):
        columns = start + steps
        inside = columns < width
        a = tl.load(left + columns[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + columns[:, None], mask=(outputs < num_outputs)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def _finish(total, outputs, num_outputs, bias, scales):
    """Applies the scale and the bias of each column of ``total``, if given."""
    inside = outputs < num_outputs
    if scales is not None:
        total = total * tl.load(scales + outputs, mask=inside, other=0.0)[None, :]
    if bias is not None:
        total = total + tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def whole_product_kernel(
    x, weight, bias, scales, out, num_rows, num_outputs, width, part_width,
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
            x, weight, rows, outputs, part * part_width, tl.minimum((part + 1) * part_width, width),
            num_rows, num_outputs, width, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
        )  # fmt: skip
    result = _finish(total, outputs, num_outputs, bias, scales).to(out.dtype.element_ty)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def part_product_kernel(
    x, weight, partial, num_rows, num_outputs, width, part_width,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes one part of a tile for each program, into ``partial`` [parts, rows, outputs] float32."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sums = _sum_part(
        x, weight, rows, outputs, part * part_width, tl.minimum((part + 1) * part_width, width),
        num_rows, num_outputs, width, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
    )  # fmt: skip
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    places = (part * num_rows + rows).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(partial + places, sums, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    partial, bias, scales, out, num_rows, num_outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds the parts of ``BLOCK`` columns of one row for each program, in order, from zero like the other kernel."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < num_outputs
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_rows + row) * num_outputs + outputs
        total += tl.load(partial + place, mask=inside, other=0.0)[None, :]
    result = _finish(total, outputs, num_outputs, bias, scales).to(out.dtype.element_ty)
    tl.store(out + row * num_outputs + outputs[None, :], result, mask=inside[None, :])


@triton.jit
def _sum_steps(
    x, weight, row, output, begin, end,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """As ``_sum_part``, over the steps ``[begin, end)`` of two tensor descriptors, for the tile at (row, output)."""
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for step in tl.range(begin, end):
        a = x.load([row, step * BLOCK_WIDTH])
        b = weight.load([output, step * BLOCK_WIDTH])
        sums = tl.dot(a, b.T, sums)
    return sums


@triton.jit
def _compute_item(
    item, x, weight, bias, scales, out, num_rows, num_outputs, parts, steps, part_steps,
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
        total = _finish(total, outputs, num_outputs, bias, scales)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    x, weight, bias, scales, out, num_rows, num_outputs, parts, steps, part_steps,
    SPLITS: tl.constexpr, HAS_ONE_PART: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes one item for each program. ``x`` and ``weight`` are tensor descriptors."""
    _compute_item(
        tl.program_id(0), x, weight, bias, scales, out, num_rows, num_outputs, parts, steps, part_steps,
        SPLITS, HAS_ONE_PART, GROUP, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def persistent_tile_kernel(
    x, weight, bias, scales, out, num_rows, num_outputs, parts, steps, part_steps,
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
            item, x, weight, bias, scales, out, num_rows, num_outputs, parts, steps, part_steps,
            SPLITS, HAS_ONE_PART, GROUP, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_WIDTH,
        )  # fmt: skip


def num_parts(num_outputs: int, width: int) -> int:
    """Number of parts, a power of two: brings few rows to about ``_WANTED_PROGRAMS`` programs.

    Depends only on the shape.
    """
    wanted = _WANTED_PROGRAMS // triton.cdiv(num_outputs, 64)
    most = max(1, width // _LEAST_PART)
    return int(1 << (max(1, min(wanted, most)).bit_length() - 1))


@dataclass(frozen=True, slots=True)
class _Division:
    """How a weight's columns are divided: into ``parts`` of ``part_steps`` steps each, the last one maybe of fewer."""

    step: int  # columns
    steps: int
    parts: int
    part_steps: int

    @classmethod
    def of(cls, weight: Tensor) -> _Division:
        num_outputs, width = weight.shape
        step = _TILE_BYTES // weight.element_size()
        steps, parts = triton.cdiv(width, step), num_parts(num_outputs, width)
        return cls(step, steps, parts, triton.cdiv(steps, parts))


# Fusion is off in all kernels, so that the tilings round alike: a multiplication and the addition after it round
# separately.
def _add_parts(partial: Tensor, bias: Tensor | None, scales: Tensor | None, out: Tensor) -> None:
    """Adds ``partial`` [parts, rows, outputs] into ``out`` [rows, outputs]."""
    parts, num_rows, num_outputs = partial.shape
    add_parts_kernel[(num_rows, triton.cdiv(num_outputs, _REDUCE_BLOCK))](
        partial, bias, scales, out, num_rows, num_outputs,
        PARTS=parts, BLOCK=_REDUCE_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonTiling:
    """A :class:`trtx.torch_engine.runner.invariant_multiplier.Tiling`.

    ``scales`` [outputs] float32 multiply the sums.
    """

    rows: int
    scales: Tensor | None = None

    def takes(self, weight: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        num_rows, (num_outputs, width) = x.shape[0], weight.shape
        division = _Division.of(weight)
        parts, part_width = division.parts, division.part_steps * division.step
        if self.rows > _FEW_ROWS:
            block_rows, block_outputs = (128, 128) if x.element_size() <= 2 else (64, 64)
            tiles = triton.cdiv(num_rows, block_rows) * triton.cdiv(num_outputs, block_outputs)
            whole_product_kernel[(tiles,)](
                x, weight, bias, self.scales, out, num_rows, num_outputs, width, part_width,
                PARTS=parts, GROUP=_GROUP, BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs,
                BLOCK_WIDTH=division.step, num_warps=8, num_stages=3, enable_fp_fusion=False,
            )  # fmt: skip
            return
        partial = torch.empty(parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        part_product_kernel[(triton.cdiv(num_outputs, 64), parts, triton.cdiv(num_rows, 64))](
            x, weight, partial, num_rows, num_outputs, width, part_width,
            BLOCK_ROWS=64, BLOCK_OUTPUTS=64, BLOCK_WIDTH=division.step,
            num_warps=4, num_stages=4, enable_fp_fusion=False,
        )  # fmt: skip
        _add_parts(partial, bias, self.scales, out)


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
_HOPPER_TILES = (
    (128, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3, splits=True)),
    (256, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3, splits=True)),
    (512, Tile(128, 256, 4, 4, is_persistent=True), Tile(128, 128, 4, 6, is_persistent=True)),
)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """A :class:`trtx.torch_engine.runner.invariant_multiplier.Tiling` whose loads the TMA does.

    A program that computes several parts needs registers for two tiles of sums, so ``of_parts`` is smaller than
    ``of_one``, the tile for weights of a single part. ``scales`` [outputs] float32 multiply the sums.
    """

    rows: int
    of_one: Tile
    of_parts: Tile
    scales: Tensor | None = None

    def takes(self, weight: Tensor) -> bool:
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] != _HOPPER:
            return False
        row_bytes = weight.shape[1] * weight.element_size()
        is_aligned = row_bytes % _TMA_ALIGNMENT == 0 and weight.data_ptr() % _TMA_ALIGNMENT == 0
        return weight.element_size() <= 2 and is_aligned

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if x.data_ptr() % _TMA_ALIGNMENT:
            x = x.clone()
        num_rows, num_outputs = out.shape
        division = _Division.of(weight)
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
            bias, self.scales, sums, num_rows, num_outputs, division.parts, division.steps, division.part_steps,
            SPLITS=tile.splits, HAS_ONE_PART=division.parts == 1, GROUP=_GROUP,
            BLOCK_ROWS=tile.rows, BLOCK_OUTPUTS=tile.outputs, BLOCK_WIDTH=division.step,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
        if tile.splits:
            _add_parts(sums, bias, self.scales, out)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED


def gpu_tilings(scales: Tensor | None = None) -> list[TritonTiling | HopperTiling]:
    """In ascending order of rows. Of two for the same rows the first is used, if it gives the same bits."""
    hopper = [HopperTiling(rows, of_one, of_parts, scales) for rows, of_one, of_parts in _HOPPER_TILES]
    any_gpu = [TritonTiling(_FEW_ROWS, scales), TritonTiling(_MANY_ROWS, scales)]
    return sorted([*hopper, *any_gpu], key=lambda tiling: tiling.rows)


def triton_multiplier() -> InvariantMultiplier:
    return InvariantMultiplier(gpu_tilings())


class InvariantScaledLinear:
    """:class:`trtx.torch_engine.runner.scaled_linear.ScaledLinear` with batch-invariant rows."""

    def __init__(
        self, *, weight: Tensor, row_scales: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` float8_e4m3fn [rows, columns]; ``row_scales`` float32 [rows]; ``input_scale`` float32 scalar."""
        self.input_scale = input_scale
        self._weight = weight
        self._bias = bias
        self._scales = (row_scales * input_scale).contiguous()
        self._product = InvariantMultiplier(gpu_tilings(self._scales), out_dtype=dtype)
        if weight.is_cuda or triton.knobs.runtime.interpret:  # else the values are only copied to a GPU
            self._product.admit(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias)

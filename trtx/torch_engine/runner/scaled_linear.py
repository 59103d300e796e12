"""Products of float8 operands on Ada, Hopper and later: the weight stays in float8, half of bfloat16's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from trtx.torch_engine.runner.triton_product import few_rows_product_kernel

FEW_ROWS = 64
"""Up to how many rows of x our own kernel computes a product: there it waits for the weight alone, and x fits into one
program. ``benchmarks/fp8_decode.py`` prints both for each shape."""

_MAX_ROW_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Tile:
    """How our own kernel cuts up a weight. The defaults: 16 KiB of it an iteration, three of them in shared memory."""

    rows: int = 64  # the fewest that Hopper's tensor cores take
    columns: int = 256
    stages: int = 3
    programs: int = 3  # wanted for each processor: as many as fit beside each other


_TILE = Tile()


class ScaledLinear:
    """See :class:`trtx.torch_engine.runner.linear.Linear`. x is float8_e4m3fn, the result ``dtype``.

    Both ways use fast accumulation: the tensor cores' own sums, which keep fewer bits than float32, are not moved to
    float32 registers in between. So does TensorRT-LLM (``cpp/tensorrt_llm/thop/cublasScaledMM.cpp``); what it costs is
    small beside what rounding to four bits has cost already.
    """

    def __init__(
        self, *, weight: Tensor, row_scales: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 16; ``row_scales`` float32 [rows], since the merged
        parts of a weight have scales of their own; ``input_scale`` float32 scalar."""
        self.input_scale = input_scale
        self._weight = weight
        self._scales = row_scales * input_scale
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS:
            return self.few_rows(x)
        return self.many_rows(x)

    def many_rows(self, x: Tensor) -> Tensor:
        """cuBLAS with a scale for each row of the weight; those of x are ones, its scale being in the weight's."""
        return torch._scaled_mm(
            x,
            self._weight.t(),
            scale_a=_ones(x.device, triton.next_power_of_2(x.shape[0]))[: x.shape[0]],
            scale_b=self._scales[None],
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )

    def few_rows(self, x: Tensor, tile: Tile = _TILE) -> Tensor:
        """Our own kernel."""
        num_x, (rows, columns) = x.shape[0], self._weight.shape
        row_blocks = triton.cdiv(rows, tile.rows)
        splits, share = _split(row_blocks, columns, tile, _processors(x.device))
        block_x = max(16, triton.next_power_of_2(num_x))
        out = torch.empty(num_x, rows, dtype=self._dtype, device=x.device)
        partial = None
        if splits > 1:
            partial = torch.empty(row_blocks, splits, tile.rows, block_x, dtype=torch.float32, device=x.device)
        few_rows_product_kernel[(row_blocks, splits)](
            x, self._weight, self._scales, self._bias, out, partial, _arrived(x.device),
            num_x, rows, columns, share, splits,
            IS_SPLIT=splits > 1, BLOCK_X=block_x, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns,
            num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        return out


def _split(row_blocks: int, columns: int, tile: Tile, processors: int) -> tuple[int, int]:
    """(splits of the columns, columns of one): equal shares, as many as give every processor its programs."""
    iterations = triton.cdiv(columns, tile.columns)
    wanted = max(1, tile.programs * processors // row_blocks)
    splits = next(splits for splits in range(min(wanted, iterations), 0, -1) if iterations % splits == 0)
    return splits, iterations // splits * tile.columns


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters of one product at a time: the products of a device follow each other on one stream."""
    return torch.zeros(_MAX_ROW_BLOCKS, dtype=torch.int32, device=device)


@cache
def _ones(device: torch.device, count: int) -> Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)

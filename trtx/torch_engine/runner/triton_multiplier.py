"""Batch-invariant matmuls on a GPU, of Triton kernels with a fixed summation order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trtx.checkpoint.formats import BLOCK_SCALES, ROW_SCALES, TENSOR_SCALES
from trtx.torch_engine.runner.fp8 import Quantize
from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier, Tiling
from trtx.torch_engine.runner.linear import Linear
from trtx.torch_engine.runner.scaled_linear import padded_scales, quantizer
from trtx.torch_engine.runner.triton_hopper_tilings import HOPPER_TILES, HopperTiling
from trtx.torch_engine.runner.triton_tilings import FEW_ROWS, MANY_ROWS, TritonTiling


def gpu_tilings(scales: Tensor | None = None, quantize: Quantize | None = None) -> list[Tiling]:
    """In ascending order of rows. Of two for the same rows the first is used, if it gives the same bits."""
    tilings: list[Tiling] = [HopperTiling(*tiles, scales, quantize) for tiles in HOPPER_TILES]
    tilings += [TritonTiling(rows, scales, quantize) for rows in (FEW_ROWS, MANY_ROWS)]
    return sorted(tilings, key=lambda tiling: tiling.rows)


def triton_multiplier() -> InvariantMultiplier:
    return InvariantMultiplier(gpu_tilings())


class _InvariantLinear:
    """A :class:`trtx.torch_engine.runner.linear.Linear` with a float8 weight and batch-invariant rows."""

    input_scale: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None, product: InvariantMultiplier) -> None:
        self._weight = weight
        self._bias = bias
        self._product = product

    def admit(self) -> None:
        """Tests the tilings: see :meth:`InvariantMultiplier.admit`."""
        self._product.admit(self._weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias)


class InvariantScaledLinear(_InvariantLinear):
    """:class:`trtx.torch_engine.runner.scaled_linear.ScaledLinear` with batch-invariant rows."""

    def __init__(
        self, *, weight: Tensor, row_scales: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` float8_e4m3fn [rows, columns]; ``row_scales`` float32 [rows]; ``input_scale`` float32 scalar."""
        self.input_scale = input_scale
        self._scales = (row_scales * input_scale).contiguous()
        super().__init__(weight, bias, InvariantMultiplier(gpu_tilings(self._scales), out_dtype=dtype))


class InvariantRowScaledLinear(_InvariantLinear):
    """:class:`trtx.torch_engine.runner.scaled_linear.RowScaledLinear` with batch-invariant rows."""

    def __init__(self, *, weight: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``weight`` float8_e4m3fn [rows, columns]; ``row_scales`` float32 [rows]."""
        self._scales = row_scales.contiguous()
        quantize = quantizer(ROW_SCALES, weight.device)
        super().__init__(weight, bias, InvariantMultiplier(gpu_tilings(self._scales, quantize), x_dtype=dtype))


class InvariantBlockScaledLinear(_InvariantLinear):
    """:class:`trtx.torch_engine.runner.scaled_linear.BlockScaledLinear` with batch-invariant rows."""

    def __init__(self, *, weight: Tensor, block_scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 128; ``block_scales`` float32 [rows / 128, columns /
        128].
        """
        self._scales = padded_scales(block_scales)
        quantize = quantizer(BLOCK_SCALES, weight.device)
        tilings = [TritonTiling(rows, None, quantize, self._scales) for rows in (FEW_ROWS, MANY_ROWS)]
        super().__init__(weight, bias, InvariantMultiplier(tilings, x_dtype=dtype))


INVARIANT_LINEARS: Mapping[str, Callable[..., Linear]] = {
    TENSOR_SCALES: InvariantScaledLinear,
    ROW_SCALES: InvariantRowScaledLinear,
    BLOCK_SCALES: InvariantBlockScaledLinear,
}
"""By the kind of matmul (:func:`trtx.checkpoint.formats.products_of`)."""

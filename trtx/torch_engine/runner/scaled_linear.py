"""Matmuls of float8 operands on Ada, Hopper and later: the weight stays in float8, half the bytes of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from trtx.checkpoint.formats import BLOCK_SCALES, FP8_BLOCK, ROW_SCALES, TENSOR_SCALES, padded_blocks
from trtx.torch_engine.runner.fp8 import Quantize, quantize_groups, quantize_rows
from trtx.torch_engine.runner.linear import Linear


class ScaledLinear:
    """A float8 linear layer (:class:`trtx.torch_engine.runner.linear.Linear`).

    x is float8_e4m3fn, the result ``dtype``. It runs cuBLAS through ``torch._scaled_mm``. A single scale for the whole
    weight is faster, at Qwen3-8B's shapes by up to a third with 64 rows of x (``benchmarks/fp8_decode.py``); scales for
    each row serve weights whose merged parts have different scales. A custom split-K Triton kernel gained 4 % on one
    shape with 8 rows and lost 10 to 50 % with 64 rows, which does not justify its code.

    Fast accumulation: the tensor cores' own sums, which keep fewer bits than float32, are not moved to float32
    registers in between. TensorRT-LLM does the same (``cpp/tensorrt_llm/thop/cublasScaledMM.cpp``). The loss is small
    compared with the rounding of the operands to four significant bits.
    """

    def __init__(
        self, *, weight: Tensor, row_scales: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 16.

        ``row_scales`` float32 [rows], since the merged parts of a weight may have different scales. ``input_scale``
        float32 scalar. Without values (on the device ``meta``), each row is assumed to have a scale of its own.
        """
        self.input_scale = input_scale
        self._columns = weight.t()
        self._bias = bias
        self._dtype = dtype
        has_one_scale = not row_scales.is_meta and bool((row_scales == row_scales[0]).all())
        # With a scale for each row of the weight, x needs scales too: they are ones, and x's scale is in the weight's.
        self._scales = row_scales[0].clone() if has_one_scale else (row_scales * input_scale)[None]

    @property
    def _has_one_scale(self) -> bool:
        return self._scales.ndim == 0

    def admit(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        return torch._scaled_mm(
            x,
            self._columns,
            scale_a=self.input_scale if self._has_one_scale else _ones(x.device, x.shape[0]),
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )


class RowScaledLinear:
    """A linear layer (:class:`trtx.torch_engine.runner.linear.Linear`) that quantizes each row of x with its own scale.

    x and the result have ``dtype``. It runs cuBLAS with scales of rows, as :class:`ScaledLinear` does.
    """

    input_scale = None

    def __init__(self, *, weight: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 16. ``row_scales`` float32 [rows]."""
        self._columns = weight.t()
        self._scales = row_scales[None]
        self._bias = bias
        self._dtype = dtype
        self._quantize = quantizer(ROW_SCALES, weight.device)

    def admit(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = self._quantize(x)
        return torch._scaled_mm(
            values,
            self._columns,
            scale_a=scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )


class BlockScaledLinear:
    """A linear layer (:class:`trtx.torch_engine.runner.linear.Linear`) whose weight has a scale for each block.

    It quantizes each group of 128 columns of a row of x with its own scale. x and the result have ``dtype``. It runs
    cuBLAS through ``torch.nn.functional.scaled_mm``, which adds the sums of 128 columns in float32, on Hopper alone.
    """

    input_scale = None

    def __init__(self, *, weight: Tensor, block_scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 128. ``block_scales`` float32 [rows / 128, columns /
        128].
        """
        self._columns = weight.t()
        self._scales = padded_scales(block_scales).t()
        self._bias = bias
        self._dtype = dtype
        self._quantize = quantizer(BLOCK_SCALES, weight.device)

    def admit(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = self._quantize(x)
        product = F.scaled_mm(
            values,
            self._columns,
            scales,
            ScalingType.BlockWise1x128,
            self._scales,
            ScalingType.BlockWise128x128,
            output_dtype=self._dtype,
        )[: x.shape[0]]
        return product if self._bias is None else product.add_(self._bias)


SCALED_LINEARS: Mapping[str, Callable[..., Linear]] = {
    TENSOR_SCALES: ScaledLinear, ROW_SCALES: RowScaledLinear, BLOCK_SCALES: BlockScaledLinear,
}  # fmt: skip
"""By the kind of matmul (:func:`trtx.checkpoint.formats.products_of`)."""


def padded_scales(scales: Tensor) -> Tensor:
    """Returns ``scales`` [blocks of rows, blocks of columns] with zeros up to the columns that cuBLAS reads."""
    count = scales.shape[1]
    return F.pad(scales, (0, padded_blocks(count * FP8_BLOCK) - count))


def quantizer(product: str, device: torch.device) -> Quantize:
    """Returns what quantizes the input of a matmul with ``ROW_SCALES`` or ``BLOCK_SCALES``, on a GPU with Triton."""
    if device.type == "cpu":
        return quantize_rows if product == ROW_SCALES else quantize_groups
    from trtx.torch_engine.runner import triton_quantize

    return triton_quantize.quantize_rows if product == ROW_SCALES else triton_quantize.quantize_groups


def _ones(device: torch.device, count: int) -> Tensor:
    """Returns ones, float32 [count, 1], as a view of a cached tensor, because a CUDA graph keeps reading its memory."""
    return _kept_ones(device, 1 << (count - 1).bit_length())[:count]


@cache
def _kept_ones(device: torch.device, count: int) -> Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)

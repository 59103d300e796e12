"""Matmuls of float8 operands on Ada, Hopper and later: the weight stays in float8, half the bytes of bfloat16."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


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


def _ones(device: torch.device, count: int) -> Tensor:
    """Returns ones, float32 [count, 1], as a view of a cached tensor, because a CUDA graph keeps reading its memory."""
    return _kept_ones(device, 1 << (count - 1).bit_length())[:count]


@cache
def _kept_ones(device: torch.device, count: int) -> Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)

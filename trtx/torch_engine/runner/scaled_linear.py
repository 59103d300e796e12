"""Products of float8 operands on Ada, Hopper and later: the weight stays in float8, half of bfloat16's bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class ScaledLinear:
    """See :class:`trtx.torch_engine.runner.linear.Linear`. x is float8_e4m3fn, the result ``dtype``.

    cuBLAS through ``torch._scaled_mm``. One scale for the whole weight is the faster way, at Qwen3-8B's shapes by up to
    a third at 64 rows of x (``benchmarks/fp8_decode.py``); a scale a row is there for weights whose merged parts have
    scales of their own. A Triton kernel of our own, split over the columns, gained 4 % on one shape at 8 rows and lost
    10 to 50 % at 64: it is not worth its lines.

    Fast accumulation: the tensor cores' own sums, which keep fewer bits than float32, are not moved to float32
    registers in between. So does TensorRT-LLM (``cpp/tensorrt_llm/thop/cublasScaledMM.cpp``); what it costs is small
    beside what rounding to four bits has cost already.
    """

    def __init__(
        self, *, weight: Tensor, row_scales: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """``weight`` float8_e4m3fn [rows, columns], multiples of 16; ``row_scales`` float32 [rows], since the merged
        parts of a weight may have scales of their own; ``input_scale`` float32 scalar."""
        self.input_scale = input_scale
        self._columns = weight.t()
        self._bias = bias
        self._dtype = dtype
        self._has_one_scale = bool((row_scales == row_scales[0]).all())
        # Where rows of x want scales too, theirs are ones and x's own scale is in the weight's.
        self._scales = row_scales[0].clone() if self._has_one_scale else (row_scales * input_scale)[None]

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
    """float32 [count, 1], a part of a few tensors that are kept: a CUDA graph goes on reading it."""
    return _kept_ones(device, 1 << (count - 1).bit_length())[:count]


@cache
def _kept_ones(device: torch.device, count: int) -> Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)

"""Quantization of a matmul's input on a GPU, with scales computed from the input: launches of Triton kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from trtx.checkpoint.formats import FP8_BLOCK
from trtx.torch_engine.runner.fp8 import FP8, padded_rows
from trtx.torch_engine.runner.linear import OVERLAPPED_TOKENS
from trtx.torch_engine.triton_pointwise import quantize_groups_kernel, quantize_rows_kernel

_GROUPS = 8  # of FP8_BLOCK columns in a program


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`trtx.torch_engine.runner.fp8.quantize_rows`, for a contiguous x on a GPU."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    overlaps = _overlaps(x)
    quantize_rows_kernel[(rows,)](
        x, out, scales, columns, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        OVERLAPS=overlaps, launch_pdl=overlaps,
    )  # fmt: skip
    return out, scales


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`trtx.torch_engine.runner.fp8.quantize_groups`, for a contiguous x on a GPU."""
    rows, columns = x.shape
    padded, groups = padded_rows(rows), columns // FP8_BLOCK
    out = torch.empty(padded, columns, dtype=FP8, device=x.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    overlaps = _overlaps(x)
    quantize_groups_kernel[(padded, triton.cdiv(groups, _GROUPS))](
        x, out, scales, rows, padded, columns, GROUPS=_GROUPS, WIDTH=FP8_BLOCK, num_warps=4,
        OVERLAPS=overlaps, launch_pdl=overlaps,
    )  # fmt: skip
    return out, scales.t()


def _overlaps(x: Tensor) -> bool:
    """Whether the launch may begin before the previous one has ended. GPUs with these matmuls support it."""
    return not x.is_cpu and x.shape[0] <= OVERLAPPED_TOKENS

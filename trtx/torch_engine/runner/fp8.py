"""float8_e4m3fn, the only 8-bit floating point format for weights, activations and KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.formats import FP8_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes x ``[n, columns]``, and returns its values in float8_e4m3fn and their scales."""
_ROWS_MULTIPLE = 4  # of an input with scales of groups: cuBLAS reads 16 bytes of them at once


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale`` in float8_e4m3fn, computed in float32 and saturated, since torch may convert an overflow to NaN."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes ``x`` [n, columns] with a scale for each row, which maps the row's largest magnitude to 448.

    Returns (float8_e4m3fn ``[n, columns]``, float32 scales ``[n, 1]``). The scale of zeros is 1.
    """
    scales = x.abs().amax(-1, keepdim=True).float() / FP8_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return to_fp8(x, scales), scales


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes ``x`` [n, columns] with a scale for each ``FP8_BLOCK`` columns of a row, as the matmul takes it.

    ``columns`` is a multiple of ``FP8_BLOCK``. Returns (float8_e4m3fn ``[padded, columns]``, float32 scales ``[padded,
    groups]``, the columns of which are contiguous), where ``padded`` is :func:`padded_rows` of n. Padding is zeros.
    """
    rows = x.shape[0]
    filled = F.pad(x, (0, 0, 0, padded_rows(rows) - rows))
    values, scales = quantize_rows(filled.reshape(-1, FP8_BLOCK))
    return values.view(filled.shape), scales.view(filled.shape[0], -1).t().contiguous().t()


def padded_rows(rows: int) -> int:
    """Returns the number of rows to which a matmul with scales of groups needs its input padded."""
    return -(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE

"""float8_e4m3fn, the only 8-bit floating point format for weights, activations and KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale`` in float8_e4m3fn, computed in float32 and saturated, since torch may convert an overflow to NaN."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)

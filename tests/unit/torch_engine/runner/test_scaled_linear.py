"""float8 products against the dequantized ones; torch computes them on a CPU too."""

from __future__ import annotations

import pytest
import torch

from trtx.torch_engine.runner.fp8 import to_fp8
from trtx.torch_engine.runner.scaled_linear import ScaledLinear


@pytest.mark.parametrize("has_one_scale", [True, False])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_x", [1, 5, 64, 130])
def test_a_scaled_product_equals_the_dequantized_one(num_x: int, biased: bool, has_one_scale: bool) -> None:
    torch.manual_seed(num_x)
    rows, columns, scale = 48, 512, torch.tensor(0.013)
    row_scales = torch.full((rows,), 4e-4) if has_one_scale else torch.rand(rows) * 1e-3 + 1e-4
    weight = to_fp8(torch.randn(rows, columns) * 0.02, row_scales[:, None])
    x = to_fp8(torch.randn(num_x, columns), scale)
    bias = torch.randn(rows, dtype=torch.bfloat16) if biased else None
    expected = (x.float() * scale) @ (weight.float() * row_scales[:, None]).T
    if bias is not None:
        expected += bias.float()
    linear = ScaledLinear(weight=weight, row_scales=row_scales, input_scale=scale, bias=bias, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x).float(), expected, rtol=2e-2, atol=2e-2)

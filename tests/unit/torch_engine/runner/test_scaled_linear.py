"""float8 products against the dequantized ones; torch computes them on a CPU too."""

from __future__ import annotations

import pytest
import torch

from trtx.torch_engine.runner.formats import RoundFp8Rows
from trtx.torch_engine.runner.fp8 import quantize_groups, quantize_rows, to_fp8
from trtx.torch_engine.runner.scaled_linear import RowScaledLinear, ScaledLinear


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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_x", [1, 5, 130])
def test_so_does_one_that_quantizes_each_row_of_its_input(num_x: int, biased: bool) -> None:
    torch.manual_seed(num_x)
    rows, columns = 48, 512
    row_scales = torch.rand(rows) * 1e-3 + 1e-4
    weight = to_fp8(torch.randn(rows, columns) * 0.02, row_scales[:, None])
    x = (torch.randn(num_x, columns) * torch.logspace(-2, 2, num_x)[:, None]).bfloat16()
    x[1:2] = 0
    bias = torch.randn(rows, dtype=torch.bfloat16) if biased else None
    expected = RoundFp8Rows()(x.float()) @ (weight.float() * row_scales[:, None]).T
    if bias is not None:
        expected += bias.float()
    linear = RowScaledLinear(weight=weight, row_scales=row_scales, bias=bias, dtype=torch.bfloat16)
    assert linear.input_scale is None
    torch.testing.assert_close(linear(x).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_x", [1, 4, 7])
def test_quantized_groups_are_padded_and_lie_as_cublas_reads_them(num_x: int) -> None:
    x = torch.randn(num_x, 384) * torch.logspace(-3, 3, num_x)[:, None]
    x[-1] = 0
    values, scales = quantize_groups(x)
    padded = -(-num_x // 4) * 4
    assert values.shape == (padded, 384) and scales.shape == (padded, 3) and scales.stride() == (1, padded)
    assert not values[num_x - 1 :].float().any() and (scales > 0).all()
    assert torch.equal(values.float()[:num_x] * scales[:num_x].repeat_interleave(128, 1), RoundFp8Rows(128)(x))
    values, scales = quantize_rows(x)
    assert torch.equal(values.float() * scales, RoundFp8Rows()(x))

"""Products whose rows do not see each other. Without a GPU: TRITON_INTERPRET=1 and the package triton, of 3.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, IS_INTERPRETED, TOLERANCE

from trtx.checkpoint.formats import BLOCK_SCALES, ROW_SCALES
from trtx.torch_engine.runner.formats import RoundFp8Rows
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
HAS_FP8 = IS_INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
HAS_TMA = IS_INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9)
# Few outputs of many columns are summed in parts; the others in one. None is a multiple of a tile.
SHAPES = [(96, 1100), (70, 2050), (200, 96)]
ALIGNED = [(96, 1104), (70, 2056), (200, 96)]  # rows of a multiple of 16 bytes, which the TMA needs
CASES = [(*shape, dtype) for dtype in DTYPES for shape in SHAPES]
CASES += [(*shape, dtype) for dtype in DTYPES if dtype != torch.float32 for shape in ALIGNED if shape not in SHAPES]
ROWS = [1, 17, 64, 65, 130]
MOST_ROWS = 257


@pytest.fixture(autouse=True)
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's ``tl.dot`` is numpy's product, whose rounding goes by an element's place; a GPU's does not.
    Of numbers of 11 bits it is exact in float64, before it is rounded once."""
    if IS_INTERPRETED:
        real = np.matmul

        def exact(a: Any, b: Any, dtype: Any = None, **more: Any) -> Any:
            if dtype is None:
                return real(a, b, **more)
            return real(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

        monkeypatch.setattr(np, "matmul", exact)


def rows_of(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(MOST_ROWS, width, device=DEVICE).half().to(dtype)


def check(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    whole = run(x)
    error = (whole.float() - expected).norm() / expected.norm()
    assert error < bound
    for count in ROWS:
        assert torch.equal(run(x[:count]), whole[:count]), count
        assert torch.equal(run(x[-count:]), whole[-count:]), count


@pytest.mark.parametrize(("outputs", "width", "dtype"), CASES)
def test_a_row_is_the_same_alone_and_among_any_others(outputs: int, width: int, dtype: torch.dtype) -> None:
    from trtx.torch_engine.runner.triton_multiplier import gpu_tilings, triton_multiplier

    torch.manual_seed(0)
    weight = torch.randn(outputs, width, device=DEVICE).half().to(dtype)
    count = len(gpu_tilings()) if HAS_TMA and dtype != torch.float32 and (outputs, width) in ALIGNED else 2
    for bias in (None, torch.randn(outputs, device=DEVICE).to(dtype)):
        multiplier = triton_multiplier()
        multiplier.admit(weight, bias)
        assert len(multiplier.tilings(weight, bias)) == count, "the tilings differ in a bit"
        x = rows_of(width, dtype)
        offset = 0.0 if bias is None else bias.double()
        expected = (x.double() @ weight.double().t() + offset).float()
        check(lambda rows: multiplier(rows, weight, bias), x, expected, TOLERANCE[dtype])  # noqa: B023
        out = torch.empty(9, outputs, dtype=dtype, device=DEVICE)
        assert multiplier(x[:9], weight, bias, out=out) is out
        assert torch.equal(out, multiplier(x[:9], weight, bias))


@pytest.mark.skipif(not HAS_FP8, reason="needs an Ada or Hopper GPU")
@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize(("outputs", "width"), [(96, 2064), (208, 96)])
def test_a_row_of_float8_is_the_same_alone_and_among_any_others(outputs: int, width: int, one_scale: bool) -> None:
    from trtx.torch_engine.runner.triton_multiplier import InvariantScaledLinear, gpu_tilings

    torch.manual_seed(0)
    dtype = torch.float16 if IS_INTERPRETED else torch.bfloat16
    weight = to_fp8(torch.randn(outputs, width, device=DEVICE), torch.tensor(0.01, device=DEVICE))
    scales = torch.full((outputs,), 0.01, device=DEVICE)
    if not one_scale:
        scales[outputs // 2 :] = 0.03
    input_scale = torch.tensor(0.02, device=DEVICE)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    linear = InvariantScaledLinear(weight=weight, row_scales=scales, input_scale=input_scale, bias=bias, dtype=dtype)
    linear.admit()
    tilings = gpu_tilings(scales * input_scale)
    multiplier = InvariantMultiplier(tilings, out_dtype=dtype)
    multiplier.admit(weight, bias)
    takers = [one for one in tilings if one.takes(weight)]
    assert len(multiplier.tilings(weight, bias)) == len(takers), "the tilings differ in a bit"
    x = to_fp8(rows_of(width, torch.float32), input_scale)
    assert x.dtype == FP8
    expected = (x.double() * 0.02) @ (weight.double() * scales.double()[:, None]).t() + bias.double()
    check(linear, x, expected.float(), 3e-2)


@pytest.mark.skipif(not HAS_FP8, reason="needs an Ada or Hopper GPU")
@pytest.mark.parametrize("kind", [ROW_SCALES, BLOCK_SCALES])
@pytest.mark.parametrize(("outputs", "width"), [(128, 2176), (384, 128)])
def test_so_is_a_row_whose_scales_are_its_own(outputs: int, width: int, kind: str) -> None:
    from trtx.torch_engine.runner.triton_multiplier import INVARIANT_LINEARS

    torch.manual_seed(0)
    dtype = torch.float16 if IS_INTERPRETED else torch.bfloat16
    if kind == ROW_SCALES:
        scales = torch.rand(outputs, device=DEVICE) * 0.01 + 0.002
        whole, named = scales[:, None], {"row_scales": scales}
    else:
        scales = torch.rand(outputs // 128, width // 128, device=DEVICE) * 0.01 + 0.002
        whole, named = scales.repeat_interleave(128, 0).repeat_interleave(128, 1), {"block_scales": scales}
    weight = to_fp8(torch.randn(outputs, width, device=DEVICE), whole)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    linear = INVARIANT_LINEARS[kind](weight=weight, bias=bias, dtype=dtype, **named)
    linear.admit()
    x = rows_of(width, torch.float32) * torch.logspace(-1, 1, MOST_ROWS, device=DEVICE)[:, None]
    x = (x * torch.logspace(-1, 0.5, width // 128, device=DEVICE).repeat_interleave(128)).to(dtype)
    rounded = RoundFp8Rows(None if kind == ROW_SCALES else 128)(x.float())
    expected = rounded.double() @ (weight.double() * whole.double()).t() + bias.double()
    check(linear, x, expected.float(), 3e-2)


def test_a_tiling_that_rounds_otherwise_is_not_used() -> None:
    from trtx.torch_engine.runner.triton_tilings import TritonTiling

    class Backwards(TritonTiling):
        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor) -> None:
            super().__call__(x.flip(1), weight.flip(1), bias, out)

    torch.manual_seed(0)
    weight = torch.randn(96, 1100, device=DEVICE).half().float()
    multiplier = InvariantMultiplier([Backwards(64), TritonTiling(256)])
    multiplier.admit(weight)
    assert [tiling.rows for tiling in multiplier.tilings(weight)] == [256]

"""float8 in the Triton kernels against torch: results for scaled products, the KV cache.

Without a GPU: TRITON_INTERPRET=1 and the package triton.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DEVICE,
    DTYPES,
    IS_INTERPRETED,
    SCALE,
    SLOTS,
    Pair,
    alike,
    close,
    config,
    decode_inputs,
    random,
    span_inputs,
)

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.fp8 import FP8, quantize_groups, quantize_rows
from trtx.torch_engine.runner.linear import PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp
from trtx.torch_engine.runner.weights import LayerWeights

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAS_FP8 or IS_INTERPRETED), reason="needs an Ada or Hopper GPU, or TRITON_INTERPRET=1"),
]


@pytest.fixture
def scale() -> torch.Tensor:
    return torch.tensor(SCALE, device=DEVICE)


def pair_of(shape: ModelConfig, processors: int = 132) -> Pair:
    """A cache whose scales differ between layers and kinds."""
    return Pair(shape, FP8, processors, torch.tensor([[0.5, 2.0], [0.02, 0.007]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gate_give_the_products_float8(dtype: torch.dtype, scale: torch.Tensor) -> None:
    pair = pair_of(config(heads=4, kv_heads=2, head_dim=24))
    x, residual, weight = random(7, 96, dtype=dtype), random(7, 96, dtype=dtype), random(96, dtype=dtype)
    x[0, 0] = 1e4  # saturates
    alike(pair.triton.rms_norm(x, weight, scale), pair.reference.rms_norm(x, weight, scale), dtype)
    ours, total = pair.triton.add_rms_norm(x, residual, weight, scale)
    expected, expected_total = pair.reference.add_rms_norm(x, residual, weight, scale)
    alike(ours, expected, dtype)
    close(total, expected_total)
    gate_up = random(7, 2 * 1100, dtype=dtype)
    alike(pair.triton.silu_and_mul(gate_up, scale), pair.reference.silu_and_mul(gate_up, scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes_float8_under_the_layers_scales(dtype: torch.dtype) -> None:
    pair = pair_of(config(heads=6, kv_heads=2, head_dim=24))
    unused = torch.empty(0, device=DEVICE)
    linear, norms = PlainLinear(unused), [random(24, dtype=dtype) for _ in range(2)]
    weights = LayerWeights(unused, linear, *norms, linear, unused, DenseMlp(linear, linear))
    inputs = decode_inputs([0, 7, 8, 131, 0], [4, 0, 1, 2, SLOTS])  # the last is padding: no write
    qkv = random(5, 10 * 24, dtype=dtype)
    before = pair.cache.pool.clone()
    q, expected = (kernels.rope_and_write(qkv, 1, weights, inputs) for kernels in (pair.triton, pair.reference))
    close(q, expected)
    alike(pair.cache.pool, pair.reference_cache.pool, dtype)
    changed = (pair.cache.pool.float() != before.float()).flatten(4).any(-1).sum(dim=(0, 3))  # [layers, 2]: tokens
    assert changed.tolist() == [[0, 0], [4, 4]]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("is_decode", "processors"), [(True, 4), (True, 132), (False, 132)], ids=["decode", "decode in splits", "prefill"]
)
def test_attention_reads_float8_under_the_layers_scales(
    is_decode: bool, processors: int, dtype: torch.dtype, scaled: bool, scale: torch.Tensor
) -> None:
    inputs = span_inputs([(3, 0, 1), (1, 0, 70), (0, 13, 33), (4, 100, 60), (2, 31, 1)])
    if is_decode:
        inputs = decode_inputs([0, 7, 63, 64, 159], [0, 3, 2, 1, 4])
    pair = pair_of(config(heads=8, kv_heads=2, head_dim=32), processors)
    q = random(inputs.positions.shape[0], 8, 32, dtype=dtype)
    out_scale = scale if scaled else None
    ours = pair.triton.attend(q, 1, pair.triton.planned(inputs, q.dtype), out_scale)
    expected = pair.reference.attend(q, 1, inputs, out_scale)
    if scaled:
        alike(ours, expected, dtype)
    else:
        close(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "columns"), [(1, 256), (3, 1152), (8, 640), (5, 12288)])
def test_inputs_are_quantized_with_the_scales_of_their_rows_and_groups(
    num_rows: int, columns: int, dtype: torch.dtype
) -> None:
    from trtx.torch_engine.runner import triton_quantize

    x = random(num_rows, columns, dtype=torch.float32) * torch.logspace(-2, 2, num_rows, device=DEVICE)[:, None]
    x *= torch.logspace(-1, 1, columns // 128, device=DEVICE).repeat_interleave(128)
    x[-1, :128] = 0
    x = x.to(dtype)
    pairs = ((triton_quantize.quantize_rows, quantize_rows), (triton_quantize.quantize_groups, quantize_groups))
    for ours, reference in pairs:
        (values, scales), (expected, expected_scales) = ours(x), reference(x)
        assert values.shape == expected.shape and scales.stride() == expected_scales.stride()
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        alike(values, expected, dtype)

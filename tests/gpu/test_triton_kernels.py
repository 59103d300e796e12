"""Each Triton kernel against its reference in torch. Without a GPU: TRITON_INTERPRET=1 and the package triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    DTYPES,
    IS_INTERPRETED,
    SLOTS,
    Pair,
    close,
    config,
    decode_inputs,
    random,
    span_inputs,
)

from trtx.checkpoint.gemma3 import Gemma3
from trtx.checkpoint.rope import RopeConfig
from trtx.torch_engine.runner.kernels import KvCache
from trtx.torch_engine.runner.linear import PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp
from trtx.torch_engine.runner.torch_kernels import TorchKernels
from trtx.torch_engine.runner.weights import LayerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gate_equal_torch(dtype: torch.dtype) -> None:
    pair = Pair(config(heads=4, kv_heads=2, head_dim=24), dtype)
    x, residual, weight = random(7, 96, dtype=dtype), random(7, 96, dtype=dtype), random(96, dtype=dtype)
    close(pair.triton.rms_norm(x, weight), pair.reference.rms_norm(x, weight))
    for actual, expected in zip(
        pair.triton.add_rms_norm(x, residual, weight), pair.reference.add_rms_norm(x, residual, weight), strict=True
    ):
        close(actual, expected)
    gate_up = random(7, 2 * 1100, dtype=dtype)
    close(pair.triton.silu_and_mul(gate_up), pair.reference.silu_and_mul(gate_up))
    close(pair.triton.gelu_and_mul(gate_up), pair.reference.gelu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one != torch.float32])
def test_a_norm_with_a_wider_weight_rounds_once(dtype: torch.dtype) -> None:
    """Gemma 3's: one plus what is stored, in float32."""
    pair = Pair(config(heads=4, kv_heads=2, head_dim=24), dtype)
    x, weight = random(7, 96, dtype=dtype), 1.0 + random(96, dtype=torch.float32)
    found = pair.triton.rms_norm(x, weight)
    assert found.dtype == dtype
    close(found, pair.reference.rms_norm(x, weight))
    exact = torch.nn.functional.rms_norm(x.float(), (96,), weight, 1e-6).to(dtype)
    assert (found == exact).float().mean() > 0.95, "the others are ties, or a float32 rounding away from one"


@pytest.mark.parametrize("dtype", DTYPES)
def test_local_layers_rotate_by_a_base_of_their_own(dtype: torch.dtype) -> None:
    local = Gemma3(1.0, 1.0, RopeConfig(theta=20.0), is_local=(False, True))
    shape = replace(config(heads=6, kv_heads=2, head_dim=24), gemma3=local)
    pair = Pair(shape, dtype)
    norms = [1.0 + random(24, dtype=torch.float32) for _ in range(2)]
    unused = torch.empty(0, device=DEVICE)
    linear = PlainLinear(unused)
    weights = LayerWeights(unused, linear, *norms, linear, unused, DenseMlp(linear, linear))
    inputs = decode_inputs([0, 7, 8, 131, 0], [4, 0, 1, 2, SLOTS])
    qkv = random(5, 10 * 24, dtype=dtype)
    by_layer = []
    for layer in range(2):
        q, expected = (kernels.rope_and_write(qkv, layer, weights, inputs) for kernels in (pair.triton, pair.reference))
        close(q, expected)
        by_layer.append(q.float())
    close(pair.cache.pool, pair.reference_cache.pool)
    assert not torch.allclose(*by_layer, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "padding"), [(True, 0), (False, 0), (True, 600)])
def test_rope_writes_only_the_cells_of_its_tokens(dtype: torch.dtype, normed: bool, padding: int) -> None:
    shape = config(heads=6, kv_heads=2, head_dim=24)
    pair = Pair(shape, dtype)
    norms = [random(24, dtype=dtype) if normed else None for _ in range(2)]
    unused = torch.empty(0, device=DEVICE)
    linear = PlainLinear(unused)
    weights = LayerWeights(unused, linear, *norms, linear, unused, DenseMlp(linear, linear))
    positions, slots = [0, 7, 8, 131, 0], [4, 0, 1, 2, SLOTS]  # the last is padding: no write
    inputs = decode_inputs(positions + [0] * padding, slots + [SLOTS] * padding)
    qkv = random(5 + padding, 10 * 24, dtype=dtype)
    before = pair.cache.pool.clone()
    q, expected = (kernels.rope_and_write(qkv, 1, weights, inputs) for kernels in (pair.triton, pair.reference))
    close(q, expected)
    close(pair.cache.pool, pair.reference_cache.pool)
    changed = (pair.cache.pool != before).flatten(4).any(-1).sum(dim=(0, 3))  # [layers, 2]: tokens written
    assert changed.tolist() == [[0, 0], [4, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_that_come_with_the_tokens_are_taken_in_place_of_the_tables(dtype: torch.dtype) -> None:
    shape = config(heads=6, kv_heads=2, head_dim=24)
    pair = Pair(shape, dtype)
    unused = torch.empty(0, device=DEVICE)
    linear = PlainLinear(unused)
    weights = LayerWeights(unused, linear, None, None, linear, unused, DenseMlp(linear, linear))
    inputs = decode_inputs([0, 7, 8, 131, 0], [4, 0, 1, 2, SLOTS])
    by_token = replace(inputs, rotary=torch.randn(5, 24, device=DEVICE))
    qkv = random(5, 10 * 24, dtype=dtype)
    q, expected = (kernels.rope_and_write(qkv, 1, weights, by_token) for kernels in (pair.triton, pair.reference))
    close(q, expected)
    close(pair.cache.pool, pair.reference_cache.pool)
    by_table = pair.triton.rope_and_write(qkv, 0, weights, inputs)
    assert not torch.allclose(by_table.float(), q.float(), atol=0.1)


@pytest.mark.skipif(IS_INTERPRETED, reason="needs gigabytes")
def test_long_contexts_in_a_pool_past_two_billion_elements_equal_torch() -> None:
    from trtx.torch_engine.runner.triton_kernels import TritonKernels

    shape = config(heads=32, kv_heads=8, head_dim=128)
    blocks, width = 19_000, 1024  # of 32 tokens and two layers: 2.5 billion elements
    pool = torch.randn(blocks, 8, 2, 2, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=DEVICE, dtype=torch.int32)[: 4 * width].view(4, width)
    cache, rotary = KvCache.of(pool, table), torch.empty(0)
    ours, reference = TritonKernels(shape, cache, rotary, 132), TorchKernels(shape, cache, rotary)
    inputs = decode_inputs([32_767, 20_000, 5], [0, 1, 2])
    q = random(3, 32, 128, dtype=torch.bfloat16)
    close(ours.attend(q, 1, ours.planned(inputs, q.dtype)), reference.attend(q, 1, inputs))
    spans = span_inputs([(2, 31_000, 600), (0, 0, 300)])
    q = random(900, 32, 128, dtype=torch.bfloat16)
    close(ours.attend(q, 1, ours.planned(spans, q.dtype)), reference.attend(q, 1, spans))

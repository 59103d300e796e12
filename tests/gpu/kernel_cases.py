"""Kernels under test and their reference over the same cache, and inputs for them."""

from __future__ import annotations

import os

import torch

from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.rope import RopeConfig
from trtx.checkpoint.windows import Windows
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans
from trtx.torch_engine.runner.rope import rotary_table
from trtx.torch_engine.runner.torch_kernels import TorchKernels

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SCALE = 0.013  # of a float8 product's input
SLOTS, TOKENS_PER_BLOCK, BLOCKS_PER_SLOT = 5, 8, 20


def config(*, heads: int, kv_heads: int, head_dim: int, windows: Windows = ()) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=96, intermediate_size=80, num_layers=2,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, norm_eps=1e-6, max_position=160,
        rope=RopeConfig(theta=1e4), tied_head=True, qkv_bias=False, output_bias=False, qk_norm=True,
        dtype="float32", synthetic_seed=None, synthetic_std=0.02, windows=windows,
    )  # fmt: skip


class Pair:
    """The same cache twice, one for each implementation. ``scales`` [2, 2]: of a float8 pool, a layer's k and v."""

    def __init__(
        self,
        shape: ModelConfig,
        dtype: torch.dtype,
        processors: int = 132,
        scales: torch.Tensor | None = None,
    ) -> None:
        from trtx.torch_engine.runner.triton_kernels import TritonKernels

        torch.manual_seed(0)
        num_blocks = SLOTS * BLOCKS_PER_SLOT + 3
        pool = torch.randn(num_blocks, 2, 2, TOKENS_PER_BLOCK, shape.num_kv_heads, shape.head_dim, device=DEVICE)
        stored = pool.to(dtype) if scales is None else to_fp8(pool, scales[None, :, :, None, None, None])
        stored = stored.permute(0, 4, 1, 2, 3, 5).contiguous()  # as it lies in memory
        table = torch.zeros(SLOTS + 1, BLOCKS_PER_SLOT, dtype=torch.int32, device=DEVICE)
        order = torch.randperm(num_blocks, device=DEVICE)[: SLOTS * BLOCKS_PER_SLOT]
        table[:SLOTS] = order.view(SLOTS, BLOCKS_PER_SLOT).int()
        rotary = rotary_table(shape.rope, shape.head_dim, shape.max_position, DEVICE)
        self.reference_cache, self.cache = (KvCache.of(stored.clone(), table, scales) for _ in range(2))
        local = None
        if shape.gemma3 is not None:
            local = rotary_table(shape.gemma3.local_rope, shape.head_dim, shape.max_position, DEVICE)
        self.reference = TorchKernels(shape, self.reference_cache, rotary, local_rotary=local)
        self.triton = TritonKernels(shape, self.cache, rotary, processors, local_rotary=local)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def decode_inputs(positions: list[int], slots: list[int]) -> PassInputs:
    tensor = torch.tensor([[0] * len(slots), positions, slots], dtype=torch.int32, device=DEVICE)
    return PassInputs(*tensor.unbind(0))


def span_inputs(spans: list[tuple[int, int, int]]) -> PassInputs:
    """``spans``: (slot, context, new tokens) of each sequence."""
    positions = [context + i for _, context, length in spans for i in range(length)]
    slots = [slot for slot, _, length in spans for _ in range(length)]
    starts = [sum(length for _, _, length in spans[:i]) for i in range(len(spans) + 1)]
    inputs = decode_inputs(positions, slots)
    ints = [
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in ([s for s, _, _ in spans], starts, [c for _, c, _ in spans])
    ]
    most = max(length for _, _, length in spans)
    return PassInputs(inputs.token_ids, inputs.positions, inputs.slots, Spans(*ints, most))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def alike(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal but for few values that lie between two of float8 and were rounded to the other one.

    Both are of ``SCALE``. ``dtype``: what was computed in, whose own error may be more than a step of float8 near 0.
    """
    assert actual.dtype == expected.dtype == FP8
    actual, expected = actual.float(), expected.float()
    if IS_INTERPRETED:  # Triton 3.6's interpreter forgets the carry of a mantissa that is rounded up to 2
        mantissa = expected.frexp().mantissa.abs()
        sure = (mantissa != 0.5) & (mantissa != 0.9375)
        actual, expected = actual[sure], expected[sure]
    torch.testing.assert_close(actual, expected, rtol=0.13, atol=TOLERANCE[dtype] / SCALE)
    assert (actual - expected).abs().mean() < 0.01 * expected.abs().mean()

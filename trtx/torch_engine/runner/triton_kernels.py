"""CUDA kernels: launches of :mod:`triton_pointwise` and :mod:`triton_attention`.

They are hand-written instead of using ``torch.compile`` for two reasons. Nearly all of them compile once for all batch
sizes: a runner of Qwen3-8B's shape with 13 CUDA graphs is ready in 6 s on an H100 (weights drawn on the device), while
a compiled layer is compiled again for each captured size. And a KV write that uses the pool's strides never copies a
block-major pool, which ``torch.compile`` does when it functionalises the write.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.fp8 import FP8
from trtx.torch_engine.runner.kernels import DEFAULT_ATTENTION, Attention, KvCache, PassInputs, Spans
from trtx.torch_engine.runner.ragged_attention import RaggedAttention
from trtx.torch_engine.runner.triton_attention import merge_splits_kernel, paged_decode_kernel, paged_prefill_kernel
from trtx.torch_engine.runner.weights import LayerWeights
from trtx.torch_engine.triton_pointwise import rms_norm_kernel, rope_and_write_kernel, silu_and_mul_kernel

_MAX_SPLITS = 32
_SILU_BLOCK = 1024
_MANY_ROWS = 512
_DECODE_TOKENS = 64  # KV tokens in one iteration
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class TritonKernels:
    """See :class:`trtx.torch_engine.runner.kernels.Kernels`. Tensors must be contiguous."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvCache,
        rotary: Tensor,
        num_processors: int,
        attention: Attention = DEFAULT_ATTENTION,
        overlapped_tokens: int = 0,
    ) -> None:
        """``rotary``: :func:`trtx.torch_engine.runner.rope.rotary_table`. ``num_processors``: the GPU's SMs.

        ``overlapped_tokens``: in forwards with at most this many tokens, launches overlap their neighbours.
        """
        self._config = config
        self._ragged = None
        if attention is not Attention.BY_ROWS:
            self._ragged = RaggedAttention(config, cache, num_processors, fixed=attention is Attention.FIXED)
        self._cache = cache
        self._rotary = rotary
        self._num_processors = num_processors
        self._attention = attention
        self._overlapped_tokens = overlapped_tokens
        self._layers = [cache.pool[:, layer] for layer in range(config.num_layers)]
        self._kv_scales: list[Tensor | None] = [None] * config.num_layers
        if cache.scales is not None:
            self._kv_scales = list(cache.scales.unbind(0))
        self._table_width = cache.block_table.shape[1]
        block_stride, _, kv_stride, token_stride, head_stride, _ = cache.pool.stride()
        self._strides = (block_stride, kv_stride, token_stride, head_stride)
        self._scale = config.head_dim**-0.5 * math.log2(math.e)  # the kernels' exponentials are to base 2
        self._block_dim = max(16, triton.next_power_of_2(config.head_dim))
        self._shape = {
            "NUM_HEADS": config.num_heads,
            "NUM_KV_HEADS": config.num_kv_heads,
            "HEAD_DIM": config.head_dim,
            "TOKENS_PER_BLOCK": cache.tokens_per_block,
        }

    def rms_norm(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        return self._norm(x, None, weight, None, scale)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        return self._norm(x, residual, weight, total, scale), total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        rows, hidden = x.shape
        overlaps = rows <= self._overlapped_tokens
        out = _empty_like(x, scale)
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, scale, hidden, self._config.norm_eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            OVERLAPS=overlaps, launch_pdl=overlaps,
        )  # fmt: skip
        return out

    def rope_and_write(self, qkv: Tensor, layer: int, weights: LayerWeights, inputs: PassInputs) -> Tensor:
        config, rows = self._config, qkv.shape[0]
        q = torch.empty(rows, config.num_heads, config.head_dim, dtype=qkv.dtype, device=qkv.device)
        # Few tokens: many small programs to fill the GPU. Many tokens: few programs, each with wide loads. The threads
        # of a program sum a head's norm, so the summation order changes with the program's size.
        is_small = rows < _MANY_ROWS or self._attention is Attention.FIXED
        heads = 2 if is_small else 16
        overlaps = rows <= self._overlapped_tokens
        grid = (rows, triton.cdiv(config.num_heads + 2 * config.num_kv_heads, heads))
        rope_and_write_kernel[grid](
            qkv, q, weights.q_norm, weights.k_norm,
            self._rotary if inputs.rotary is None else inputs.rotary, inputs.positions, inputs.slots,
            self._cache.block_table, self._layers[layer], self._kv_scales[layer],
            config.norm_eps, self._table_width, self._cache.padding_slot, *self._strides,
            **self._shape, HAS_NORM=weights.q_norm is not None, ROTARY_BY_TOKEN=inputs.rotary is not None,
            BLOCK_HEADS=heads, OVERLAPS=overlaps, launch_pdl=overlaps,
            BLOCK=triton.next_power_of_2(config.head_dim // 2), num_warps=1 if is_small else 4,
        )  # fmt: skip
        return q

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        return inputs if self._ragged is None else self._ragged.planned(inputs, dtype)

    def attend(self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None) -> Tensor:
        out = _empty_like(q, scale)
        if self._ragged is not None:
            self._ragged.attend(q, layer, inputs.work, out, scale, overlaps=q.shape[0] <= self._overlapped_tokens)
        elif inputs.spans is None:
            self._decode(q, layer, inputs, out, scale)
        else:
            if count := inputs.num_decodes:
                self._decode(q[:count], layer, inputs, out[:count], scale)
            self._prefill(q, layer, inputs.spans, out, scale)
        return out.view(q.shape[0], -1)

    def _num_splits(self, rows: int) -> int:
        """A power of two, at most 32, that gives every SM about two programs."""
        wanted = 2 * self._num_processors // (rows * self._config.num_kv_heads)
        return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))

    def _decode(self, q: Tensor, layer: int, inputs: PassInputs, out: Tensor, scale: Tensor | None) -> None:
        config, rows = self._config, q.shape[0]
        splits, overlaps = self._num_splits(rows), rows <= self._overlapped_tokens
        parts = (rows, config.num_heads, splits)
        partial = lse = None
        if splits > 1:
            partial = torch.empty(*parts, config.head_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        paged_decode_kernel[(rows, config.num_kv_heads, splits)](
            q, self._layers[layer], self._cache.block_table, inputs.slots, inputs.positions, out, partial, lse,
            self._kv_scales[layer], scale, self._scale, self._table_width, self._cache.padding_slot, *self._strides,
            **self._shape, NUM_SPLITS=splits,
            BLOCK_HEADS=max(16, triton.next_power_of_2(config.num_heads // config.num_kv_heads)),
            BLOCK_TOKENS=_DECODE_TOKENS, BLOCK_DIM=self._block_dim, num_warps=4, num_stages=3,
            OVERLAPS=overlaps, launch_pdl=overlaps,
        )  # fmt: skip
        if splits > 1:
            merge_splits_kernel[(rows * config.num_heads,)](
                partial, lse, out, scale, HEAD_DIM=config.head_dim, NUM_SPLITS=splits, BLOCK_DIM=self._block_dim,
                DTYPE=_TRITON_DTYPES[q.dtype], num_warps=1, OVERLAPS=overlaps, launch_pdl=overlaps,
            )  # fmt: skip

    def _prefill(self, q: Tensor, layer: int, spans: Spans, out: Tensor, scale: Tensor | None) -> None:
        config = self._config
        narrow = q.dtype == torch.float32 or self._block_dim > 128  # limited by shared memory
        queries, tokens = (32, 32) if narrow else (128, 64)
        grid = (triton.cdiv(spans.max_length, queries), config.num_heads, spans.slots.shape[0])
        paged_prefill_kernel[grid](
            q, self._layers[layer], self._cache.block_table, spans.slots, spans.starts, spans.contexts, out,
            self._kv_scales[layer], scale, self._scale, self._table_width, *self._strides, **self._shape,
            BLOCK_QUERIES=queries, BLOCK_TOKENS=tokens, BLOCK_DIM=self._block_dim,
            num_warps=4 if narrow else 8, num_stages=2,
        )  # fmt: skip

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
        dtype = gate_up.dtype if scale is None else FP8
        out = torch.empty(rows, intermediate, dtype=dtype, device=gate_up.device)
        silu_and_mul_kernel[(rows, triton.cdiv(intermediate, _SILU_BLOCK))](
            gate_up, out, scale, intermediate, BLOCK=_SILU_BLOCK, num_warps=4
        )
        return out


def _empty_like(x: Tensor, scale: Tensor | None) -> Tensor:
    return torch.empty_like(x, dtype=x.dtype if scale is None else FP8)

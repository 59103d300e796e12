"""CUDA kernels: launches of :mod:`triton_pointwise` and :mod:`triton_ragged_attention`.

They are hand-written instead of using ``torch.compile`` for two reasons. Nearly all of them compile once for all batch
sizes: a runner of Qwen3-8B's shape with 13 CUDA graphs is ready in 6 s on an H100 (weights drawn on the device), while
a compiled layer is compiled again for each captured size. And a KV write that uses the pool's strides never copies a
block-major pool, which ``torch.compile`` does when it functionalises the write.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.cudnn_attention import CudnnAttention
from trtx.torch_engine.runner.fp8 import FP8
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs
from trtx.torch_engine.runner.ragged_attention import RaggedAttention
from trtx.torch_engine.runner.rope import layer_tables
from trtx.torch_engine.runner.weights import LayerWeights
from trtx.torch_engine.triton_pointwise import gate_kernel, rms_norm_kernel, rope_and_write_kernel, to_fp8_kernel

_GATE_BLOCK = 1024
_MANY_ROWS = 512
_TO_FP8_BLOCK = 4096


class TritonKernels:
    """The :class:`trtx.torch_engine.runner.kernels.Kernels` of a GPU. Tensors must be contiguous."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvCache,
        rotary: Tensor,
        num_processors: int,
        attention: Attention = Attention.BY_LENGTH,
        overlapped_tokens: int = 0,
        local_rotary: Tensor | None = None,
        long_chunks: CudnnAttention | None = None,
    ) -> None:
        """``rotary``: :func:`trtx.torch_engine.runner.rope.rotary_table`; ``local_rotary``: another, for Gemma 3.

        ``num_processors``: the GPU's SMs.

        ``overlapped_tokens``: in forwards with at most this many tokens, launches overlap their neighbours.
        ``long_chunks`` attends long prompt chunks; None: the Triton kernels do.
        """
        self._config = config
        self._ragged = RaggedAttention(config, cache, num_processors, fixed=attention is Attention.FIXED)
        self._long_chunks = long_chunks
        self._cache = cache
        self._rotary = layer_tables(config, rotary, local_rotary)
        self._attention = attention
        self._overlapped_tokens = overlapped_tokens
        places = [cache.place(layer) for layer in range(config.num_layers)]
        self._tables = [table for table, _ in places]
        self._layers = [cache.pool[:, index] for _, index in places]
        self._kv_scales: list[Tensor | None] = [None] * config.num_layers
        if cache.scales is not None:
            self._kv_scales = list(cache.scales.unbind(0))
        self._table_width = cache.block_table.shape[1]
        block_stride, _, kv_stride, token_stride, head_stride, _ = cache.pool.stride()
        self._strides = (block_stride, kv_stride, token_stride, head_stride)
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
            self._rotary[layer] if inputs.rotary is None else inputs.rotary, inputs.positions, inputs.slots,
            self._tables[layer], self._layers[layer], self._kv_scales[layer],
            config.norm_eps, self._table_width, self._cache.padding_slot, *self._strides,
            **self._shape, HAS_NORM=weights.q_norm is not None, ROTARY_BY_TOKEN=inputs.rotary is not None,
            BLOCK_HEADS=heads, OVERLAPS=overlaps, launch_pdl=overlaps,
            BLOCK=triton.next_power_of_2(config.head_dim // 2), num_warps=1 if is_small else 4,
        )  # fmt: skip
        return q

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        chunks = self._long_chunks.prepared(inputs, dtype) if self._long_chunks is not None else None
        if chunks is None:
            return self._ragged.planned(inputs, dtype)
        decodes = self._ragged.planned(inputs.of_decodes, dtype)
        return replace(inputs, work=decodes.work, long_chunks=chunks)

    def attend(
        self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        out = _empty_like(q, scale)
        self._ragged.attend(q, layer, inputs.work, out, scale, sinks, overlaps=q.shape[0] <= self._overlapped_tokens)
        if self._long_chunks is not None and inputs.long_chunks is not None:
            attended = out if scale is None else torch.empty_like(q)
            self._long_chunks.attend(q, layer, inputs.long_chunks, attended)
            if scale is not None:
                rows, result = attended[inputs.num_decodes :], out[inputs.num_decodes :]
                grid = (triton.cdiv(rows.numel(), _TO_FP8_BLOCK),)
                to_fp8_kernel[grid](rows, result, scale, rows.numel(), BLOCK=_TO_FP8_BLOCK, num_warps=8)
        return out.view(q.shape[0], -1)

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        return self._gate(gate_up, scale, gelu=False)

    def gelu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        return self._gate(gate_up, scale, gelu=True)

    @staticmethod
    def _gate(gate_up: Tensor, scale: Tensor | None, *, gelu: bool) -> Tensor:
        rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
        dtype = gate_up.dtype if scale is None else FP8
        out = torch.empty(rows, intermediate, dtype=dtype, device=gate_up.device)
        gate_kernel[(rows, triton.cdiv(intermediate, _GATE_BLOCK))](
            gate_up, out, scale, intermediate, GELU=gelu, BLOCK=_GATE_BLOCK, num_warps=4
        )
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


def _empty_like(x: Tensor, scale: Tensor | None) -> Tensor:
    return torch.empty_like(x, dtype=x.dtype if scale is None else FP8)

"""Reference kernels in plain torch: the CPU's path, and the oracle of the Triton ones."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans
from trtx.torch_engine.runner.weights import LayerWeights

_GATHERED_TOKENS = 32768  # of one layer's K and V at a time: 64 MiB in float32 with 2 heads of 128


class TorchKernels:
    """Gathers a sequence's blocks and attends with torch's scaled-dot-product attention."""

    def __init__(self, config: ModelConfig, cache: KvCache, rotary: Tensor) -> None:
        """``rotary``: see :func:`trtx.torch_engine.runner.rope.rotary_table`."""
        self._config = config
        self._cache = cache
        self._rotary = rotary

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        return inputs

    def rms_norm(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        values = x.float()
        factor = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._config.norm_eps)
        return _scaled(weight * (values * factor).to(x.dtype), scale)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, scale), total

    def rope_and_write(self, qkv: Tensor, layer: int, weights: LayerWeights, inputs: PassInputs) -> Tensor:
        config, cache = self._config, self._cache
        q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        q = q.view(-1, config.num_heads, config.head_dim)
        k = k.view(-1, config.num_kv_heads, config.head_dim)
        v = v.view(-1, config.num_kv_heads, config.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self.rms_norm(q, weights.q_norm), self.rms_norm(k, weights.k_norm)
        angles = self._rotary[inputs.positions.long()] if inputs.rotary is None else inputs.rotary
        q, k = self._rotate(q, angles), self._rotate(k, angles)
        real = inputs.slots != cache.padding_slot
        positions, slots = inputs.positions[real], inputs.slots[real]
        blocks = cache.block_table[slots.long(), (positions // cache.tokens_per_block).long()].long()
        offsets = (positions % cache.tokens_per_block).long()
        for kind, values in enumerate((k[real], v[real])):
            if cache.scales is None:
                cache.pool[blocks, layer, kind, offsets] = values.to(cache.pool.dtype)
            else:
                cache.pool[blocks, layer, kind, offsets] = to_fp8(values, cache.scales[layer, kind])
        return q

    @staticmethod
    def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
        """``[n, heads, head_dim]``; pairs are (i, i + head_dim / 2), as Hugging Face checkpoints store them."""
        cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)

    def attend(self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None) -> Tensor:
        if inputs.spans is None:
            return _scaled(self._decode(q, layer, inputs), scale)
        out = torch.empty_like(q)
        if count := inputs.num_decodes:
            decodes = replace(inputs, slots=inputs.slots[:count], positions=inputs.positions[:count])
            out[:count] = self._decode(q[:count], layer, decodes).view_as(q[:count])
        self._prefill(q, layer, inputs.spans, out)
        return _scaled(out.flatten(1), scale)

    def _gather(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks: ``[..., num_blocks]`` to ``[..., num_kv_heads, tokens, head_dim]``."""
        cache, chosen = self._cache, blocks.long()
        # [..., num_blocks, 2, tokens_per_block, heads, dim]
        if cache.scales is None:
            kv = cache.pool[chosen, layer].to(dtype)
        else:  # as bytes: torch indexes float8 on a CPU, and not in every version on CUDA
            stored = cache.pool.view(torch.uint8)[chosen, layer].view(FP8)
            kv = stored.to(dtype) * cache.scales[layer].to(dtype).view(2, 1, 1, 1)
        keys, values = kv.unbind(-4)
        return keys.flatten(-4, -3).transpose(-3, -2), values.flatten(-4, -3).transpose(-3, -2)

    def _decode(self, q: Tensor, layer: int, inputs: PassInputs) -> Tensor:
        """Many sequences at once, padded to the longest, as far as the gathered copy stays small."""
        num_blocks = int(inputs.positions.max()) // self._cache.tokens_per_block + 1
        rows = max(1, _GATHERED_TOKENS // (num_blocks * self._cache.tokens_per_block))
        out = torch.empty_like(q)
        for begin in range(0, q.shape[0], rows):
            part = slice(begin, begin + rows)
            blocks = self._cache.block_table[inputs.slots[part].long(), :num_blocks]
            keys, values = self._gather(layer, blocks, q.dtype)
            # [rows, tokens]
            seen = torch.arange(keys.shape[-2], device=q.device) <= inputs.positions[part].unsqueeze(-1)
            attended = _attend_seen(q[part], keys, values, seen)
            if not attended.isfinite().all():
                # Behind a sequence's end lies what others left there, and a mask makes of their NaN 0 * NaN.
                beyond = ~seen[:, None, :, None]
                attended = _attend_seen(q[part], keys.masked_fill(beyond, 0.0), values.masked_fill(beyond, 0.0), seen)
            out[part] = attended
        return out.flatten(1)

    def _prefill(self, q: Tensor, layer: int, spans: Spans, out: Tensor) -> None:
        """One sequence after the other: lengths differ too much to pad."""
        starts = spans.starts.tolist()
        for index, (slot, context) in enumerate(zip(spans.slots.tolist(), spans.contexts.tolist(), strict=True)):
            begin, end = starts[index], starts[index + 1]
            total = context + end - begin
            num_blocks = -(-total // self._cache.tokens_per_block)
            keys, values = self._gather(layer, self._cache.block_table[slot, :num_blocks], q.dtype)
            seen = None
            if end - begin > 1:
                seen = torch.ones(end - begin, total, dtype=torch.bool, device=q.device).tril(context)
            out[begin:end] = F.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None], keys[None, :, :total], values[None, :, :total],
                attn_mask=seen, enable_gqa=True,
            )[0].transpose(0, 1)  # fmt: skip

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _scaled(F.silu(gate) * up, scale)


def _attend_seen(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """One query a row: ``[rows, heads, head_dim]`` over the keys of which ``seen`` [rows, tokens] says True."""
    return F.scaled_dot_product_attention(
        q.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], enable_gqa=True
    ).squeeze(2)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else to_fp8(x, scale)

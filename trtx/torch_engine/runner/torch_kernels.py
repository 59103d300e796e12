"""Reference kernels in plain torch: used on a CPU, and the oracle for the Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.kv_layout import first_block
from trtx.torch_engine.runner.fixed_attention import attend_fixed
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs, Spans
from trtx.torch_engine.runner.rope import layer_tables
from trtx.torch_engine.runner.sink_attention import attend_masked
from trtx.torch_engine.runner.weights import LayerWeights

_GATHERED_TOKENS = 32768  # KV tokens of one layer gathered at once: 64 MiB in float32 with 2 heads of 128


class TorchKernels:
    """Gathers a sequence's blocks and uses torch's scaled-dot-product attention."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvCache,
        rotary: Tensor,
        attention: Attention = Attention.BY_LENGTH,
        local_rotary: Tensor | None = None,
    ) -> None:
        """``rotary``, ``local_rotary``: see :func:`trtx.torch_engine.runner.rope.rotary_table`; the latter for Gemma 3.

        ``attention``: only whether it is ``FIXED`` matters here.
        """
        self._is_fixed = attention is Attention.FIXED
        self._config = config
        self._cache = cache
        self._rotary = layer_tables(config, rotary, local_rotary)
        self._windows = config.windows or (None,) * config.num_layers

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        return inputs

    def rms_norm(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        values = x.float()
        factor = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._config.norm_eps)
        return _scaled((weight * (values * factor).to(weight.dtype)).to(x.dtype), scale)

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
        angles = self._rotary[layer][inputs.positions.long()] if inputs.rotary is None else inputs.rotary
        q, k = self._rotate(q, angles), self._rotate(k, angles)
        real = inputs.slots != cache.padding_slot
        positions, slots = inputs.positions[real], inputs.slots[real]
        table, index = cache.place(layer)
        blocks = table[slots.long(), (positions // cache.tokens_per_block).long()].long()
        offsets = (positions % cache.tokens_per_block).long()
        for kind, values in enumerate((k[real], v[real])):
            if cache.scales is None:
                cache.pool[blocks, index, kind, offsets] = values.to(cache.pool.dtype)
            else:
                cache.pool[blocks, index, kind, offsets] = to_fp8(values, cache.scales[layer, kind])
        return q

    @staticmethod
    def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
        """Applies RoPE to ``[n, heads, head_dim]``; pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints."""
        cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)

    def attend(
        self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        if self._is_fixed:
            return _scaled(self._fixed(q, layer, inputs, sinks), scale)
        if inputs.spans is None:
            return _scaled(self._decode(q, layer, inputs, sinks), scale)
        out = torch.empty_like(q)
        if count := inputs.num_decodes:
            decodes = replace(inputs, slots=inputs.slots[:count], positions=inputs.positions[:count])
            out[:count] = self._decode(q[:count], layer, decodes, sinks).view_as(q[:count])
        if inputs.decodes is not None:
            self._prefill(q, layer, inputs.decodes, out, sinks)
        self._prefill(q, layer, inputs.spans, out, sinks)
        return _scaled(out.flatten(1), scale)

    def _gather(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks: ``[..., num_blocks]`` ids to ``[..., num_kv_heads, tokens, head_dim]``."""
        cache, chosen = self._cache, blocks.long()
        index = cache.place(layer)[1]
        # [..., num_blocks, 2, tokens_per_block, heads, dim]
        if cache.scales is None:
            kv = cache.pool[chosen, index].to(dtype)
        else:  # as bytes: torch indexes float8 on a CPU, but not in every version on CUDA
            stored = cache.pool.view(torch.uint8)[chosen, index].view(FP8)
            kv = stored.to(dtype) * cache.scales[layer].to(dtype).view(2, 1, 1, 1)
        keys, values = kv.unbind(-4)
        return keys.flatten(-4, -3).transpose(-3, -2), values.flatten(-4, -3).transpose(-3, -2)

    def _decode(self, q: Tensor, layer: int, inputs: PassInputs, sinks: Tensor | None) -> Tensor:
        """Attention of decodes: batches of sequences padded to the longest, as far as the gathered copy stays small."""
        size, table = self._cache.tokens_per_block, self._cache.place(layer)[0]
        window = self._windows[layer]
        first = torch.zeros_like(inputs.positions)  # first block that each row attends to
        if window is not None:
            first = (inputs.positions - window + 1).clamp_min(0) // size
        num_blocks = int((inputs.positions // size - first).max()) + 1
        rows = max(1, _GATHERED_TOKENS // (num_blocks * size))
        out = torch.empty_like(q)
        for begin in range(0, q.shape[0], rows):
            part = slice(begin, begin + rows)
            places = first[part, None] + torch.arange(num_blocks, device=q.device)
            blocks = table[inputs.slots[part].long()[:, None], places.clamp_max(table.shape[1] - 1).long()]
            keys, values = self._gather(layer, blocks, q.dtype)
            # [rows, tokens]
            positions = first[part, None] * size + torch.arange(keys.shape[-2], device=q.device)
            seen = positions <= inputs.positions[part].unsqueeze(-1)
            if window is not None:
                seen &= positions > inputs.positions[part].unsqueeze(-1) - window
            attended = _attend_seen(q[part], keys, values, seen, sinks)
            if not attended.isfinite().all():
                # Beyond a sequence's end are stale values, and a mask turns their NaN into 0 * NaN.
                beyond = ~seen[:, None, :, None]
                keys, values = keys.masked_fill(beyond, 0.0), values.masked_fill(beyond, 0.0)
                attended = _attend_seen(q[part], keys, values, seen, sinks)
            out[part] = attended
        return out.flatten(1)

    def _prefill(self, q: Tensor, layer: int, spans: Spans, out: Tensor, sinks: Tensor | None) -> None:
        """Attention of prompt chunks, one sequence at a time: lengths differ too much for padding."""
        starts, window, size = spans.starts.tolist(), self._windows[layer], self._cache.tokens_per_block
        table = self._cache.place(layer)[0]
        for index, (slot, context) in enumerate(zip(spans.slots.tolist(), spans.contexts.tolist(), strict=True)):
            begin, end = starts[index], starts[index + 1]
            if begin == end:
                continue
            total = context + end - begin
            first = first_block(window, context, size)
            keys, values = self._gather(layer, table[slot, first : -(-total // size)], q.dtype)
            length = total - first * size
            seen = None
            if end - begin > 1 or window is not None:
                seen = torch.ones(end - begin, length, dtype=torch.bool, device=q.device).tril(context - first * size)
            if seen is not None and window is not None:
                seen = seen.triu(context - first * size - window + 1)
            out[begin:end] = attend_masked(
                q[begin:end].transpose(0, 1)[None], keys[None, :, :length], values[None, :, :length], seen, sinks
            )[0].transpose(0, 1)  # fmt: skip

    def _fixed(self, q: Tensor, layer: int, inputs: PassInputs, sinks: Tensor | None) -> Tensor:
        """FIXED attention, one sequence at a time, for decodes too. Padding rows are zeros."""
        starts = list(range(q.shape[0] + 1))
        if inputs.spans is not None:
            starts = [*range(inputs.num_decodes), *inputs.spans.starts.tolist()]
        out = torch.zeros_like(q)
        for begin, end in pairwise(starts):
            slot = int(inputs.slots[begin]) if end > begin else self._cache.padding_slot
            if slot != self._cache.padding_slot:
                positions = inputs.positions[begin:end]
                size, window = self._cache.tokens_per_block, self._windows[layer]
                first = first_block(window, int(positions[0]), size)
                blocks = self._cache.place(layer)[0][slot, first : int(positions[-1]) // size + 1]
                keys, values = self._gather(layer, blocks, q.dtype)
                out[begin:end] = attend_fixed(
                    q[begin:end], keys, values, positions, window=window, first=first * size, sinks=sinks
                )  # fmt: skip
        return out.flatten(1)

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _scaled(F.silu(gate) * up, scale)

    def gelu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _scaled(F.gelu(gate, approximate="tanh") * up, scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


def _attend_seen(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of ``q`` [rows, heads, head_dim], one query in each row, over keys with ``seen`` [rows, tokens]."""
    return attend_masked(q.unsqueeze(2), keys, values, seen[:, None, None], sinks).squeeze(2)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else to_fp8(x, scale)

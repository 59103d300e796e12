"""Attention with sinks in torch, for a CPU: torch's scaled-dot-product attention has none.

A sink is a learned logit of each head. It is one more term in the denominator of the head's softmax and has no value,
so a row can attend to nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_AT_ONCE = 1 << 24  # float32 scores held at once: 64 MiB


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Attention of ``q`` [batch, heads, rows, dim] over ``keys`` and ``values`` [batch, kv_heads, tokens, dim].

    ``seen``: the tokens that a row attends to, broadcast to [batch, heads, rows, tokens]; None: all. ``sinks`` [heads].
    Returns q's shape and dtype; with sinks, it computes in float32.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    batch, heads, rows, dim = q.shape
    kv_heads, tokens = keys.shape[1:3]
    keys, values = keys.float().unsqueeze(2), values.float().unsqueeze(2)  # [batch, kv_heads, 1, tokens, dim]
    limits = sinks.float().view(kv_heads, -1, 1, 1)  # [kv_heads, group, 1, 1]
    out = torch.empty_like(q)
    at_once = max(1, _AT_ONCE // (batch * heads * tokens))
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        queries = q[:, :, part].float().reshape(batch, kv_heads, heads // kv_heads, -1, dim) * dim**-0.5
        scores = queries @ keys.transpose(-1, -2)  # [batch, kv_heads, group, rows, tokens]
        if seen is not None:
            own = seen if seen.shape[-2] == 1 else seen[..., part, :]
            scores = scores.masked_fill(~own.unsqueeze(-3), -torch.inf)
        top = torch.maximum(scores.amax(dim=-1, keepdim=True), limits)
        shares = (scores - top).exp()
        weight = shares.sum(dim=-1, keepdim=True) + (limits - top).exp()
        out[:, :, part] = (shares @ values / weight).flatten(1, 2).to(q.dtype)
    return out

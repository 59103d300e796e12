"""Bitwise batch-invariant attention in torch: :attr:`Attention.FIXED` on a CPU.

A matmul library chooses its summation order by shapes and addresses, and a vectorised exponential rounds the end of an
array differently from its middle. So this module uses only element-wise operations that IEEE 754 rounds in a unique
way, in an order that depends only on a row's position.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.runner.kernels import FIXED_CHUNK

_AT_ONCE = 1 << 24  # float32 products held at once: 64 MiB
# Taylor series of 2**f for f in [-0.5, 0.5]; relative truncation error below 2e-7.
_EXP2 = (1.0, 0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)


def attend_fixed(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, window: int | None = None, first: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one sequence's rows over its KV: returns ``[n, heads, dim]`` in q's dtype.

    ``q`` [n, heads, dim], at ``positions`` [n], ascending; ``keys`` and ``values`` ``[kv_heads, tokens, dim]``, from
    position ``first`` on. The KV may extend beyond a row's position and hold arbitrary numbers there. ``window``: the
    number of positions that a row attends to, including its own; None: all. ``sinks`` [heads]: logits that each row's
    softmax has in addition, without values.
    """
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[0]
    at_once = max(1, _AT_ONCE // (heads * FIXED_CHUNK * dim))
    scale = dim**-0.5 * math.log2(math.e)
    grouped = (q.float() * scale).unflatten(1, (kv_heads, heads // kv_heads))
    # A sink goes before all tokens, as a token whose value is zero.
    best = None if sinks is None else (sinks.float() * math.log2(math.e)).view(kv_heads, -1)
    out = torch.empty_like(q)
    for begin in range(0, q.shape[0], at_once):
        rows = slice(begin, begin + at_once)
        attended = _attend(grouped[rows], keys, values, positions[rows], window, first, best)
        out[rows] = attended.flatten(1, 2).to(q.dtype)
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, first: int, sinks: Tensor | None
) -> Tensor:
    """``q`` [n, kv_heads, group, dim] float32, already scaled. ``sinks`` [kv_heads, group], to base 2.

    Chunks are folded left to right like in the Triton kernel.
    """
    best = q.new_full(q.shape[:3], -math.inf) if sinks is None else sinks.expand(q.shape[:3])
    weight, sums = torch.full_like(best, 0.0 if sinks is None else 1.0), torch.zeros_like(q)
    end = int(positions.max()) + 1
    lowest = first if window is None else max(first, int(positions.min()) - window + 1)
    for start in range(lowest // FIXED_CHUNK * FIXED_CHUNK, end, FIXED_CHUNK):
        tokens = torch.arange(start, start + FIXED_CHUNK, device=q.device)
        seen = tokens <= positions[:, None]
        if window is not None:
            seen &= tokens > positions[:, None] - window
        seen = seen[:, None, None]  # [n, 1, 1, tokens]
        # KV that no row attends to may be NaN: replace it by zeros before any multiplication.
        low, high = max(start, lowest), min(start + FIXED_CHUNK, end)
        part_keys, part_values = (
            F.pad(part[:, low - first : high - first].float(), (0, 0, low - start, start + FIXED_CHUNK - high))
            for part in (keys, values)
        )
        by_dim = part_keys.permute(2, 0, 1).contiguous()  # [dim, kv_heads, tokens]
        scores = tree_sum(q.movedim(-1, 0)[..., None] * by_dim[:, None, :, None]).masked_fill(~seen, -math.inf)
        top = torch.maximum(best, scores.amax(-1))
        base = top.masked_fill(top == -math.inf, 0.0)
        shares, shrink = exp2(scores - base[..., None]), exp2(best - base)
        shares = shares.movedim(-1, 0)
        by_token = part_values.movedim(1, 0)  # [tokens, kv_heads, dim]
        sums = sums * shrink[..., None] + tree_sum(shares[..., None] * by_token[:, None, :, None])
        weight = weight * shrink + tree_sum(shares.contiguous())
        best = top
    return sums / weight[..., None]


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the first dimension by adding its halves pairwise, an order that depends only on its size.

    Overwrites x.
    """
    size = x.shape[0]
    while size > 1:
        half = (size + 1) // 2
        x[: size - half] += x[half:size]
        size = half
    return x[0]


def exp2(x: Tensor) -> Tensor:
    """``2**x`` for float32 x <= 0, with multiplications and additions only; 0 below ``2**-126``."""
    whole = torch.round(x).clamp(min=-126)
    part = x - whole
    result = torch.full_like(x, _EXP2[-1])
    for factor in reversed(_EXP2[:-1]):
        result = result * part + factor
    power = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x >= -126, result * power, 0.0)

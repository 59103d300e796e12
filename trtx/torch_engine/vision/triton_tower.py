"""Fused GPU kernels for transformers' Qwen towers: each replaces five to twelve launches.

Norms, the rotation of queries and keys, and the gate between the matmuls of an MLP are short, and launching them takes
most of an image's time. The matmuls of Qwen2.5-VL's MLP have 3,420 columns, which is not a multiple of 16 bytes: cuBLAS
has no Hopper kernel for them, so they are padded with columns of zeros. Results stay the same up to the order of
roundings in float32. docs/performance-notes.md lists the gain of each.
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from trtx.torch_engine.triton_pointwise import gate_kernel, rms_norm_kernel

_COLUMNS = 64  # an MLP's width is padded to a multiple: whole tiles of a matmul's inner dimension
_GATE_BLOCK = 1024
_HEADS = 16  # heads of one token for each program


def fuse(tower: PreTrainedModel) -> None:
    """Fuses a loaded Qwen2.5-VL or Qwen3-VL tower.

    Affects the whole process: transformers finds its rotation by name.
    """
    for modeling in (modeling_qwen2_5_vl, modeling_qwen3_vl):
        modeling.apply_rotary_pos_emb_vision = _rotate
    modules: list[Any] = list(tower.modules())
    for module in modules:
        if isinstance(module, modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm):
            module.forward = MethodType(_rms_norm, module)
        mlp = getattr(module, "mlp", None)
        if isinstance(mlp, modeling_qwen2_5_vl.Qwen2_5_VLMLP) and tower.config.hidden_act == "silu":
            module.mlp = _GatedMlp(mlp)


class _GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` of transformers' module; gate and up are one matmul, padded to whole tiles."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        width = theirs.gate_proj.out_features
        zeros = -width % _COLUMNS
        both = (theirs.gate_proj, theirs.up_proj)
        self.width: int = width + zeros
        self.weight = torch.cat([pad(one.weight.detach(), (0, 0, 0, zeros)) for one in both])
        biases = [pad(one.bias.detach(), (0, zeros)) for one in both if one.bias is not None]
        self.bias: Tensor | None = torch.cat(biases) if biases else None
        self.down = pad(theirs.down_proj.weight.detach(), (0, zeros))
        self.down_bias: Tensor | None = theirs.down_proj.bias

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP to ``x`` ``[tokens, hidden]``."""
        gate_up = nn.functional.linear(x, self.weight, self.bias)
        gated = torch.empty(x.shape[0], self.width, dtype=x.dtype, device=x.device)
        gate_kernel[(x.shape[0], triton.cdiv(self.width, _GATE_BLOCK))](
            gate_up, gated, None, self.width, GELU=False, BLOCK=_GATE_BLOCK, num_warps=4
        )
        return nn.functional.linear(gated, self.down, self.down_bias)


def _rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm of ``[tokens, hidden]``."""
    x = hidden_states.contiguous()
    hidden = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(x.numel() // hidden,)](
        x, None, norm.weight, out, None, None, hidden, norm.variance_epsilon,
        HAS_RESIDUAL=False, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Same as transformers' function. ``q``, ``k``: ``[tokens, heads, dim]``; ``cos``, ``sin``: ``[tokens, dim]``."""
    tokens, heads, dim = q.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    outs = torch.empty(2, tokens, heads, dim, dtype=q.dtype, device=q.device)
    for x, out in zip((q, k), outs, strict=True):
        assert x.stride(2) == 1
        _rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            x, out, cos, sin, x.stride(0), x.stride(1),
            NUM_HEADS=heads, HEAD_DIM=dim, BLOCK_HEADS=_HEADS, BLOCK=triton.next_power_of_2(dim // 2), num_warps=2,
        )  # fmt: skip
    return outs[0], outs[1]


@triton.jit
def _rotate_kernel(
    x, out, cos, sin, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x * cos + rotate_half(x) * sin`` in float32, for ``BLOCK_HEADS`` heads of one token for each program."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    offsets = tl.arange(0, BLOCK)[None, :]
    in_half = offsets < half
    inside = (heads < NUM_HEADS) & in_half
    source = x + token * token_stride + heads * head_stride + offsets
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angles = token * HEAD_DIM + offsets
    cos_a = tl.load(cos + angles, mask=in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angles + half, mask=in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angles, mask=in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angles + half, mask=in_half, other=0.0).to(tl.float32)
    target = out + (token * NUM_HEADS + heads) * HEAD_DIM + offsets
    tl.store(target, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=inside)

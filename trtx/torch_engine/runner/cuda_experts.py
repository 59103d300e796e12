"""Mixtures of experts on a GPU: launches of :mod:`triton_experts`, and torch's grouped matmul for many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from trtx.torch_engine.runner.linear import Multiplier
from trtx.torch_engine.runner.mlp import ExpertWeights, GatedActivation
from trtx.torch_engine.runner.triton_experts import (
    down_experts_kernel,
    gated_experts_kernel,
    route_kernel,
    weighted_sum_kernel,
)

GROUPED_TOKENS = 128
"""The number of tokens from which torch's grouped matmul is used. Chosen without a measurement."""
_ALIGNMENT = 8  # elements of a row: grouped_mm needs rows of a multiple of 16 bytes
_SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The share of an expert's matmul that one Triton program computes."""

    rows: int
    outputs: int
    width: int  # columns in one iteration
    warps: int
    stages: int


def expert_tile(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTile:
    """Chooses the tile from the shapes alone: the height of a tensor core tile until experts get many tokens."""
    if dtype == torch.float32:
        return ExpertTile(16, 32, 32, 4, 2)
    if pairs <= 16 * experts:
        return ExpertTile(16, 32, 128, 4, 4)
    return ExpertTile(64, 64, 64, 4, 3)


class CudaExperts:
    """A :class:`trtx.torch_engine.runner.mlp.ExpertBackend` that never waits for the device."""

    def __init__(
        self, multiplier: Multiplier, num_experts: int, device: torch.device, *, grouped_tokens: int = GROUPED_TOKENS
    ) -> None:
        """``multiplier``: GEMM backend of the router. ``grouped_tokens``: see :data:`GROUPED_TOKENS`."""
        self._multiplier = multiplier
        self._numbers = torch.arange(num_experts, dtype=torch.int32, device=device)
        self._grouped_tokens = grouped_tokens

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        num_rows, hidden = x.shape
        num_experts, per_token = weights.router.shape[0], weights.per_token
        experts = torch.empty(num_rows * per_token, dtype=torch.int32, device=x.device)
        shares = torch.empty(num_rows, per_token, dtype=torch.float32, device=x.device)
        route_kernel[(num_rows,)](
            self._multiplier(x, weights.router), experts, shares,
            EXPERTS=num_experts, PER_TOKEN=per_token, NORMALIZES=weights.normalizes,
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_PER_TOKEN=triton.next_power_of_2(per_token),
            num_warps=1,
        )  # fmt: skip
        ordered, places = experts.sort(stable=True)
        ends = torch.searchsorted(ordered, self._numbers, right=True, out_int32=True)
        if num_rows >= self._grouped_tokens and _can_group(weights):
            outputs = _grouped(x, weights, kernels, places, ends)
        else:
            outputs = _tiled(x, weights, places, ends)
        out = torch.empty_like(x)
        weighted_sum_kernel[(num_rows, triton.cdiv(hidden, _SUM_BLOCK))](
            outputs, shares, out, hidden, PER_TOKEN=per_token, BLOCK=_SUM_BLOCK, num_warps=4
        )
        return out


def _tiled(x: Tensor, weights: ExpertWeights, places: Tensor, ends: Tensor) -> Tensor:
    """Returns the output of each pair, ``[pairs, hidden]``, in the order of tokens."""
    pairs, hidden = places.shape[0], x.shape[1]
    num_experts, intermediate = weights.router.shape[0], weights.down.shape[2]
    tile = expert_tile(pairs, num_experts, x.dtype)
    most_tiles = min(pairs, pairs // tile.rows + num_experts)
    options = {
        "EXPERTS": num_experts, "BLOCK_EXPERTS": triton.next_power_of_2(num_experts), "BLOCK_ROWS": tile.rows,
        "BLOCK_OUTPUTS": tile.outputs, "BLOCK_WIDTH": tile.width, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    gated = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    gated_experts_kernel[(most_tiles, triton.cdiv(intermediate, tile.outputs))](
        x, weights.gate_up, places, ends, gated, intermediate, hidden, PER_TOKEN=weights.per_token, **options
    )
    outputs = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    down_experts_kernel[(most_tiles, triton.cdiv(hidden, tile.outputs))](
        gated, weights.down, places, ends, outputs, hidden, intermediate, **options
    )
    return outputs


def _can_group(weights: ExpertWeights) -> bool:
    """Whether torch's grouped matmul takes the weights, on the device alone: in another dtype it waits for it."""
    sizes = (weights.gate_up.shape[2], weights.down.shape[2])
    return (
        hasattr(F, "grouped_mm")
        and weights.gate_up.is_cuda
        and weights.gate_up.dtype == torch.bfloat16
        and not any(size % _ALIGNMENT for size in sizes)
    )


def _grouped(x: Tensor, weights: ExpertWeights, kernels: GatedActivation, places: Tensor, ends: Tensor) -> Tensor:
    """Returns what :func:`_tiled` returns."""
    gate_up = F.grouped_mm(
        x.index_select(0, places // weights.per_token), weights.gate_up.transpose(1, 2), offs=ends
    )  # fmt: skip
    gated = kernels.silu_and_mul(gate_up)
    del gate_up  # it would add to the peak that trtx.memory plans for
    down = F.grouped_mm(gated, weights.down.transpose(1, 2), offs=ends)
    return torch.empty_like(down).index_copy_(0, places, down)

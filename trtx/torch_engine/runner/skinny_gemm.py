"""Skinny GEMMs: launches of :mod:`triton_skinny_gemm`, as single matmuls and fused into a decoder layer.

They are always used on a GPU, except by a deterministic runner. On an H100, one decode step of Qwen3-8B's shape with
one row takes 5.8 ms; with the library's matmuls, 6.7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from trtx.torch_engine.runner.kernels import Kernels
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, MOST_ROWS, Linear, PlainLinear
from trtx.torch_engine.runner.mlp import DenseMlp, ExpertMlp
from trtx.torch_engine.runner.rank_split import RankGroup, without_sum
from trtx.torch_engine.runner.triton_skinny_gemm import few_rows_kernel, one_row_kernel
from trtx.torch_engine.runner.weights import DecoderWeights, LayerWeights

_PREFETCHED_BYTES = 8 << 20  # of a weight, prefetched while the kernels before its matmul still run
_WANTED_PROGRAMS = 256  # about two for each SM of a Hopper GPU; the same on other GPUs
_PROGRAMS_AT_ONCE = 396  # three for each SM of an H100: the limit from shared memory
_MOST_PARTS = 12
_ALIGNMENT = 16  # columns: a thread loads eight elements at once
_PARTIAL_SIZE = 1 << 18  # float32 elements; with split-K, tiles * parts < 2 * _WANTED_PROGRAMS
_FAST_MEMORY_BYTES = 100 << 30
"""A Hopper GPU with more memory has HBM3e and reads 4.3 TB/s (H200); one with less has HBM3 and reads 3.0 (H100)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The share of a matmul that one Triton program computes.

    ``num_rows`` of x: 1, or the height of a tensor core tile, which several rows share.
    """

    num_rows: int
    outputs: int  # rows of the weight
    width: int  # columns in one iteration
    warps: int
    stages: int
    parts: int = 1


# docs/performance-notes.md: the fastest configuration for nearly every matmul, and never more than 5 % slower.
ONE_ROW = Tile(1, 8, 1024, 4, 4)
SEVERAL_ROWS = Tile(MOST_ROWS, 16, 256, 2, 5)
# Fast memory needs more bytes in flight. So a weight with few programs gets more columns in each, and a weight with
# many programs more outputs.
FEW_WIDE_PROGRAMS = Tile(MOST_ROWS, 16, 512, 2, 4)
MANY_TALL_PROGRAMS = Tile(MOST_ROWS, 32, 256, 2, 4)
_FEW, _MANY = (256, 320), 1024  # numbers of programs with SEVERAL_ROWS; others were not measured, or gain nothing


def tile_for(num_rows: int, num_outputs: int, width: int, *, has_fast_memory: bool = False) -> Tile:
    """Chooses the tile from the shapes and the device, so that a matmul gives the same bits after every start.

    ``num_outputs``: rows of the weight.
    """
    if num_rows == 1:
        return ONE_ROW
    programs = triton.cdiv(num_outputs, SEVERAL_ROWS.outputs)
    if has_fast_memory and programs > _MANY:
        return MANY_TALL_PROGRAMS
    if has_fast_memory and _FEW[0] <= programs <= _FEW[1]:
        return FEW_WIDE_PROGRAMS
    most = min(_MOST_PARTS, max(1, width // (2 * SEVERAL_ROWS.width)))
    return replace(SEVERAL_ROWS, parts=min(most, triton.cdiv(_WANTED_PROGRAMS, programs)))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory for matmuls that run one after the other on the same stream."""

    partial: Tensor  # float32
    arrived: Tensor  # int32 counters, zero between launches
    has_fast_memory: bool

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        return cls(
            torch.empty(_PARTIAL_SIZE, dtype=torch.float32, device=device),
            torch.zeros(_WANTED_PROGRAMS, dtype=torch.int32, device=device),
            device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > _FAST_MEMORY_BYTES,
        )


def few_rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, workspace: Workspace, *,
    norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None, gated: bool = False,
    overlaps: bool = False, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Computes ``out`` [n, outputs] from ``x`` [n, columns], contiguous, with n at most ``MOST_ROWS``.

    ``norm`` [columns]: RMSNorm weight applied to x (one row only) with ``eps``. ``gated``: out is ``silu(gate) * up``,
    with half as many columns as the weight has rows. ``overlaps``: the first wave of programs prefetches a part of the
    weight while the kernels before it still run. ``tile``: replaces the choice of :func:`tile_for`.
    """
    num_rows, num_outputs, (weight_rows, width) = x.shape[0], out.shape[1], weight.shape
    tile = tile or tile_for(num_rows, weight_rows, width, has_fast_memory=workspace.has_fast_memory)
    programs = triton.cdiv(num_outputs, tile.outputs // 2 if gated else tile.outputs)
    at_once = min(programs * tile.parts, _PROGRAMS_AT_ONCE)
    prefetched = min(_PREFETCHED_BYTES // (2 * tile.outputs * at_once), width)
    options = {
        "GATED": gated, "BLOCK_OUTPUTS": tile.outputs, "BLOCK_WIDTH": tile.width, "STAGES": tile.stages,
        "OVERLAPS": overlaps, "THREADS": 32 * tile.warps,
        "num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": overlaps,
    }  # fmt: skip
    if tile.num_rows == 1:
        one_row_kernel[(programs,)](
            x, weight, bias, norm, residual, out, num_outputs, width, eps, prefetched, **options
        )
        return
    if norm is not None:
        raise ValueError("a norm is fused into a matmul of one row only; normalise several rows before the matmul")
    part_width = triton.cdiv(triton.cdiv(width, tile.width), tile.parts) * tile.width
    few_rows_kernel[(programs, tile.parts)](
        x, weight, bias, residual, out, workspace.partial, workspace.arrived,
        num_rows, num_outputs, width, tile.parts, part_width, prefetched, ROWS=tile.num_rows, **options,
    )  # fmt: skip


class FewRowsMultiplier:
    """A GEMM backend (:class:`trtx.torch_engine.runner.linear.Multiplier`).

    Skinny GEMMs for few rows of 16-bit weights, the library for all others.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        return None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not 0 < x.shape[0] <= MOST_ROWS or not _fits(weight):
            return LIBRARY_MULTIPLIER(x, weight, bias, out)
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        few_rows_product(x.contiguous(), weight, bias, out, self._workspace)
        return out


class FewRowsLayers:
    """A :class:`trtx.torch_engine.runner.linear.LayerProducts` with overlapping launches.

    A matmul prefetches its weight while the kernels before it still run.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        kernels: Kernels,
        norm_eps: float,
        workspace: Workspace,
        group: RankGroup | None = None,
        *,
        overlaps: bool,
    ) -> None:
        """``weights`` must satisfy :func:`can_fuse`. ``overlaps`` needs Hopper or later.

        ``group``: the ranks that add up their partial sums. Rank 0's partial sum contains the residual.
        """
        self._group = group
        self._layers = weights.layers
        self._linears = [_plain(layer) for layer in weights.layers]
        self._kernels = kernels
        self._norm_eps = norm_eps
        self._workspace = workspace
        self._overlaps = overlaps

    def takes(self, num_tokens: int) -> bool:
        return 0 < num_tokens <= MOST_ROWS

    def qkv(self, residual: Tensor, layer: int) -> Tensor:
        return self._multiply_normed(residual, self._layers[layer].input_norm, self._linears[layer][0])

    def output(self, attended: Tensor, layer: int, residual: Tensor) -> Tensor:
        return self._multiply_summed(attended, self._linears[layer][1], residual)

    def mlp(self, residual: Tensor, layer: int) -> Tensor:
        weights, linears = self._layers[layer], self._linears[layer]
        if isinstance(weights.mlp, ExpertMlp):
            return weights.mlp.added(self._kernels.rms_norm(residual, weights.mlp_norm), self._kernels, residual)
        gated = self._multiply_normed(residual, weights.mlp_norm, linears[2], gated=True)
        return self._multiply_summed(gated, linears[3], residual)

    def _multiply_summed(self, x: Tensor, linear: PlainLinear, residual: Tensor) -> Tensor:
        if self._group is None:
            return self._multiply(x, linear, residual=residual)
        return self._group.add(self._multiply(x, linear, residual=None if self._group.rank else residual))

    def _multiply_normed(self, x: Tensor, norm: Tensor, linear: PlainLinear, *, gated: bool = False) -> Tensor:
        if x.shape[0] > 1:
            return self._multiply(self._kernels.rms_norm(x, norm), linear, gated=gated)
        return self._multiply(x, linear, norm=norm, gated=gated)

    def _multiply(
        self,
        x: Tensor,
        linear: PlainLinear,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        num_outputs = linear.weight.shape[0] // 2 if gated else linear.weight.shape[0]
        out = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
        few_rows_product(
            x, linear.weight, linear.bias, out, self._workspace, norm=norm, eps=self._norm_eps, residual=residual,
            gated=gated, overlaps=self._overlaps,
        )  # fmt: skip
        return out


def can_fuse(weights: DecoderWeights) -> bool:
    """Whether :class:`FewRowsLayers` supports these weights."""
    return all(
        isinstance(linear, PlainLinear) and linear.prepare is None and _fits(linear.weight)
        for layer in weights.layers
        for linear in _linears(layer)
    ) and all(_has_common_arithmetic(layer) for layer in weights.layers)


def _has_common_arithmetic(layer: LayerWeights) -> bool:
    """Whether a layer has only two norms, weighted in the activations' dtype, and gates with SiLU."""
    gates_with_gelu = isinstance(layer.mlp, DenseMlp) and layer.mlp.gates_with_gelu
    return layer.output_norm is None and layer.input_norm.dtype != torch.float32 and not gates_with_gelu


def _fits(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16) and weight.shape[1] % _ALIGNMENT == 0


def _linears(layer: LayerWeights) -> tuple[Linear, ...]:
    """Returns a layer's matmuls, without those of experts. For a rank, these are the matmuls that give its partial
    sums.
    """
    attention = (layer.qkv, without_sum(layer.output))
    return (
        (*attention, layer.mlp.gate_up, without_sum(layer.mlp.down)) if isinstance(layer.mlp, DenseMlp) else attention
    )


def _plain(layer: LayerWeights) -> list[PlainLinear]:
    linears = _linears(layer)
    plain = [linear for linear in linears if isinstance(linear, PlainLinear)]
    if len(plain) < len(linears):
        raise TypeError("few rows are multiplied by weights in the engine's dtype alone")
    return plain

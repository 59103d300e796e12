"""Mixtures of experts on a GPU: launches of :mod:`triton_experts`.

On an H100 at Qwen3-30B-A3B's shape these kernels are faster than ``F.grouped_mm`` of torch 2.11 for any number of
tokens: 173 us instead of 228 for 8 tokens, 1.46 ms instead of 2.00 for 8,192 (``docs/performance.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtx.checkpoint.experts import GateClamp
from trtx.errors import UsageError
from trtx.torch_engine.runner.expert_tiles import (
    HOPPER_SHARED_BYTES,
    ExpertTile,
    ExpertTiles,
    all_tiles,
    expert_tiles,
    fixed_tiles,
)
from trtx.torch_engine.runner.fp8 import FP8
from trtx.torch_engine.runner.linear import Multiplier
from trtx.torch_engine.runner.mlp import ExpertWeights, GatedActivation
from trtx.torch_engine.runner.triton_experts import (
    down_experts_kernel,
    gated_experts_kernel,
    order_pairs_kernel,
    route_kernel,
    weighted_sum_kernel,
)

_OVERLAPPED_TOKENS = range(2, 65)
"""The numbers of tokens whose launches overlap: with others, that takes longer on an H100."""
_SUM_BLOCK = 1024
_ROUTE_BLOCK = 1024
_LEAST_BINS = 16  # of a histogram of experts
_MOST_ORDERED = 4096  # pairs that a program sorts at once
_PROBED_ROWS = 200
_PROBED_SHIFTS = (0, 1, 7, 13)  # offsets by which the probe's rows are rolled
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class TileList:
    """The pairs of a forward sorted by expert: see :func:`trtx.torch_engine.runner.triton_experts.order_pairs_kernel`.

    All are int32.
    """

    pairs: Tensor  # [most tiles * rows]
    experts: Tensor  # [most tiles]
    num_tiles: Tensor  # [1]

    @classmethod
    def of(cls, most_tiles: int, rows: int, device: torch.device) -> TileList:
        sizes = [most_tiles * rows, most_tiles, 1]
        return cls(*torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=device), sizes))


class CudaExperts:
    """A :class:`trtx.torch_engine.runner.mlp.ExpertBackend` that never waits for the device."""

    def __init__(
        self, multiplier: Multiplier, *, shared_bytes: int = HOPPER_SHARED_BYTES, overlaps: bool = False
    ) -> None:
        """``multiplier``: GEMM backend of the router. ``shared_bytes``: shared memory that a program may have.

        ``overlaps`` needs Hopper or later.
        """
        self._multiplier = multiplier
        self._shared_bytes = shared_bytes
        self._overlaps = overlaps

    def admit(self, weights: ExpertWeights) -> None:
        self._multiplier.admit(weights.router, weights.router_bias)

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        return self._compute(x, weights, self._choose(x, weights), None)

    def added(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation, residual: Tensor) -> Tensor:
        return self._compute(x, weights, self._choose(x, weights), residual)

    def _choose(self, x: Tensor, weights: ExpertWeights) -> ExpertTiles:
        num_pairs, num_experts = x.shape[0] * weights.per_token, weights.router.shape[0]
        return expert_tiles(num_pairs, num_experts, weights.gate_up.dtype, self._shared_bytes)

    def _compute(self, x: Tensor, weights: ExpertWeights, tiles: ExpertTiles, residual: Tensor | None) -> Tensor:
        experts, shares, rounded = self._route(x, weights)
        if weights.prepare is not None:
            rounded = weights.prepare(x)
        outputs = self._multiply(rounded, weights, experts, x.dtype, tiles)
        return self._sum(outputs, shares, residual, is_whole=weights.is_whole)

    def _launch(self, num_rows: int) -> dict[str, object]:
        overlaps = self._overlaps and num_rows in _OVERLAPPED_TOKENS
        return {"OVERLAPS": overlaps, "launch_pdl": overlaps}

    def _sum(self, outputs: Tensor, shares: Tensor, residual: Tensor | None, *, is_whole: bool) -> Tensor:
        (num_rows, per_token), hidden = shares.shape, outputs.shape[1]
        out = torch.empty(num_rows, hidden, dtype=outputs.dtype, device=outputs.device)
        weighted_sum_kernel[(num_rows, triton.cdiv(hidden, _SUM_BLOCK))](
            outputs, shares, out, residual, hidden,
            PER_TOKEN=per_token, BLOCK=_SUM_BLOCK, PARTIAL=not is_whole, num_warps=4, **self._launch(num_rows),
        )  # fmt: skip
        return out

    def _route(self, x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Returns experts [pairs] int32, their shares [n, per_token] float32, and the input of the experts.

        The experts are indices into those that are held; see the kernel.
        """
        (num_rows, hidden), num_experts, per_token = x.shape, weights.router.shape[0], weights.per_token
        experts = torch.empty(num_rows * per_token, dtype=torch.int32, device=x.device)
        shares = torch.empty(num_rows, per_token, dtype=torch.float32, device=x.device)
        rounded = x if weights.scales is None else torch.empty_like(x, dtype=FP8)
        load, slots, padding_slot = _counted(weights)
        route_kernel[(num_rows,)](
            self._multiplier(x, weights.router, weights.router_bias), experts, shares,
            x, rounded, None if weights.scales is None else weights.scales.input, load, slots, padding_slot,
            EXPERTS=num_experts, FIRST=weights.first, HELD=weights.held,
            PER_TOKEN=per_token, NORMALIZES=weights.normalizes, HIDDEN=hidden,
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts), BLOCK_PER_TOKEN=triton.next_power_of_2(per_token),
            BLOCK_HIDDEN=_ROUTE_BLOCK, num_warps=1, **self._launch(num_rows),
        )  # fmt: skip
        return experts, shares, rounded

    def _order(self, experts: Tensor, weights: ExpertWeights, rows: int, most_tiles: int) -> TileList:
        num_pairs, num_experts = experts.shape[0], weights.held
        ordered = TileList.of(most_tiles, rows, experts.device)
        block = min(_MOST_ORDERED, max(128, triton.next_power_of_2(num_pairs)))
        order_pairs_kernel[(num_experts,)](
            experts, ordered.pairs, ordered.experts, ordered.num_tiles, num_pairs,
            EXPERTS=num_experts, BLOCK_EXPERTS=max(_LEAST_BINS, triton.next_power_of_2(num_experts)), BLOCK_ROWS=rows,
            BLOCK_PAIRS=block, num_warps=8 if block > 1024 else 4, **self._launch(num_pairs // weights.per_token),
        )  # fmt: skip
        return ordered

    def _multiply(
        self, x: Tensor, weights: ExpertWeights, experts: Tensor, dtype: torch.dtype, tiles: ExpertTiles
    ) -> Tensor:
        """Returns the output of each pair, ``[pairs, hidden]``, in the order of tokens."""
        num_pairs = experts.shape[0]
        num_experts, hidden, intermediate = weights.down.shape
        most_tiles = min(num_pairs, num_pairs // tiles.rows + num_experts)
        ordered = self._order(experts, weights, tiles.rows, most_tiles)
        scales, launch = weights.scales, self._launch(num_pairs // weights.per_token)
        gated = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
        gated_experts_kernel[(most_tiles * triton.cdiv(intermediate, tiles.gated.outputs),)](
            x, weights.gate_up, weights.gate_up_bias,
            *((None, None) if scales is None else (scales.gate_up, scales.gated)),
            ordered.pairs, ordered.experts, ordered.num_tiles, gated, num_pairs,
            PER_TOKEN=weights.per_token, OUTPUTS=intermediate, WIDTH=hidden, DTYPE=_TRITON_DTYPES[dtype],
            **_options(tiles.gated, tiles.rows), **_activation(weights.clamp), **launch,
        )  # fmt: skip
        if weights.prepare_gated is not None:
            gated = weights.prepare_gated(gated)
        outputs = torch.empty(num_pairs, hidden, dtype=dtype, device=x.device)
        # The down projection overlaps the gate only if nothing runs in between: it reads the list of tiles early.
        launch = launch if weights.prepare_gated is None else {"OVERLAPS": False}
        down_experts_kernel[(most_tiles * triton.cdiv(hidden, tiles.down.outputs),)](
            gated, weights.down, weights.down_bias, None if scales is None else scales.down,
            ordered.pairs, ordered.experts, ordered.num_tiles, outputs, num_pairs,
            OUTPUTS=hidden, WIDTH=intermediate, **_options(tiles.down, tiles.rows), **launch,
        )  # fmt: skip
        return outputs


class InvariantExperts(CudaExperts):
    """:class:`CudaExperts` in which a row's bits depend only on that row.

    It uses the tiles that give the same bits as those for any number of rows. As in
    :mod:`trtx.torch_engine.runner.invariant_multiplier`, this is tested, not assumed.
    """

    def __init__(self, multiplier: Multiplier, *, shared_bytes: int = HOPPER_SHARED_BYTES) -> None:
        """``multiplier``: batch-invariant GEMM backend of the router. ``shared_bytes``: as in :class:`CudaExperts`."""
        super().__init__(multiplier, shared_bytes=shared_bytes)
        self._admitted: dict[tuple[object, ...], frozenset[ExpertTiles]] = {}

    def admit(self, weights: ExpertWeights) -> None:
        super().admit(weights)
        if _key(weights) in self._admitted:
            return
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_PROBED_ROWS, weights.router.shape[1], generator=generator).to(weights.router)
        fixed = fixed_tiles(weights.gate_up.dtype)
        reference = self._compute(x, weights, fixed, None)
        if not self._is_free(x, weights, fixed, reference):
            raise UsageError(
                f"experts of {tuple(weights.gate_up.shape)} in {weights.gate_up.dtype} round differently by a row's "
                f"place among others on this {weights.router.device.type}, so --deterministic can't be kept here; "
                "leave it out"
            )
        self._admitted[_key(weights)] = frozenset(
            tiles
            for tiles in all_tiles(weights.gate_up.dtype, self._shared_bytes)
            if self._is_free(x, weights, tiles, reference)
        )

    def _is_free(self, x: Tensor, weights: ExpertWeights, tiles: ExpertTiles, reference: Tensor) -> bool:
        """Whether the tiles give ``reference`` for x, for its first row alone, and for x with its rows rolled."""
        if not torch.equal(self._compute(x[:1].clone(), weights, tiles, None), reference[:1]):
            return False
        return all(
            torch.equal(self._compute(x.roll(shift, 0), weights, tiles, None), reference.roll(shift, 0))
            for shift in _PROBED_SHIFTS
        )

    def _choose(self, x: Tensor, weights: ExpertWeights) -> ExpertTiles:
        fastest = super()._choose(x, weights)
        return fastest if fastest in self._admitted[_key(weights)] else fixed_tiles(weights.gate_up.dtype)


def _key(weights: ExpertWeights) -> tuple[object, ...]:
    return weights.gate_up.shape, weights.gate_up.dtype, weights.per_token


def _activation(clamp: GateClamp | None) -> dict[str, object]:
    return {} if clamp is None else {"CLAMPED": True, "ALPHA": clamp.alpha, "LIMIT": clamp.limit}


def _counted(weights: ExpertWeights) -> tuple[Tensor | None, Tensor | None, int]:
    """Returns the arguments that count the layer's tokens: the counters, the slots of the forward's rows, and the
    padding slot.
    """
    load = weights.load
    if load is None or load.rows.slots is None:
        return None, None, 0
    return load.tokens, load.rows.slots, load.rows.padding_slot


def _options(tile: ExpertTile, rows: int) -> dict[str, object]:
    return {
        "BLOCK_ROWS": rows, "BLOCK_OUTPUTS": tile.outputs, "BLOCK_WIDTH": tile.width, "SWAPPED": tile.swapped,
        "THREADS": 32 * tile.warps, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip

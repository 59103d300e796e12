"""The tilings of batch-invariant matmuls on a GPU, beside cuBLAS: ``deterministic.py --matmuls``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from fp8_products import CACHE_BYTES, SHAPES, mean_us
from torch import Tensor

from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier, Tiling
from trtx.torch_engine.runner.triton_hopper_tilings import HopperTile, HopperTiling
from trtx.torch_engine.runner.triton_multiplier import gpu_tilings
from trtx.torch_engine.runner.triton_tilings import Division

_SPLIT = "+parts"


def candidates(texts: Iterable[str]) -> dict[str, Tiling]:
    """Returns a tiling for each text ``ROWSxOUTPUTSxWARPSxSTAGES``; ``+parts`` behind it: a program for each part.

    Raises ValueError for other texts.
    """
    found: dict[str, Tiling] = {}
    for text in texts:
        rows, outputs, warps, stages = (int(number) for number in text.removesuffix(_SPLIT).split("x"))
        tile = HopperTile(rows, outputs, warps, stages, splits=text.endswith(_SPLIT))
        found[text] = HopperTiling(512, tile, tile)
    return found


@torch.inference_mode()
def measure_matmuls(counts: Sequence[int], more: Mapping[str, Tiling]) -> list[dict[str, object]]:
    """Prints and returns the microseconds of each tiling by matmul and number of rows. ``more``: :func:`candidates`.

    ``engine`` is the tiling that the engine uses for this number of rows. Only tilings that give the engine's bits are
    timed.
    """
    own = gpu_tilings()
    named = {f"{type(one).__name__.removesuffix('Tiling').lower()} {one.rows}": one for one in own} | dict(more)
    width = max(12, *(len(name) for name in named))
    columns = "  ".join(f"{name:>{width}}" for name in named)
    print(f"{'matmul':<8} {'parts':>5} {'rows':>5}  {'cuBLAS':>8}  {'engine':>8}  {'ratio':>5}  {columns}")
    found: list[dict[str, object]] = []
    for name, (outputs, inputs) in SHAPES.items():
        copies = -(-CACHE_BYTES // (outputs * inputs))
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(copies)]
        engine = InvariantMultiplier(own)
        engine.admit(weights[0])
        ways = {key: one for key, one in named.items() if _agrees(one, engine, weights[0])}
        parts = Division.of(weights[0]).parts
        for count in counts:
            x = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
            cublas = mean_us([_bound(F.linear, weight) for weight in weights], x)
            chosen = mean_us([_bound(engine, weight) for weight in weights], x)
            us = {key: mean_us([_tiled(one, weight) for weight in weights], x) for key, one in ways.items()}
            cells = "  ".join(f"{us[key]:>{width}.1f}" if key in us else f"{'–':>{width}}" for key in named)
            print(
                f"{name:<8} {parts:>5} {count:>5}  {cublas:>8.1f}  {chosen:>8.1f}  {chosen / cublas:>5.2f}  {cells}",
                flush=True,
            )
            found.append({"matmul": name, "parts": parts, "rows": count, "cublas": cublas, "engine": chosen} | us)
        del weights
    return found


def _agrees(tiling: Tiling, engine: InvariantMultiplier, weight: Tensor) -> bool:
    """Whether the tiling gives the bits of the engine's first tiling, for rows in any place."""
    if not tiling.takes(weight):
        return False
    both = InvariantMultiplier([engine.tilings(weight)[0], tiling])
    both.admit(weight)
    return len(both.tilings(weight)) == 2


def _bound(product: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: product(x, weight)


def _tiled(tiling: Tiling, weight: Tensor) -> Callable[[Tensor], None]:
    return lambda x: tiling(x, weight, None, x.new_empty(x.shape[0], weight.shape[0]))

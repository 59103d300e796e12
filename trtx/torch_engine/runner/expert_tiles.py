"""The tiles of experts' matmuls on a GPU, by the number of pairs.

They are the fastest of 22 and 21 tiles for few tokens, and of 4 to 7 for many, on an H100 at Qwen3-30B-A3B's shape
(``docs/performance.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtx.torch_engine.runner.fp8 import FP8


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The share of an expert's matmul that one Triton program computes."""

    outputs: int  # rows of the weight; of gate, and as many of up
    width: int  # columns in one iteration
    warps: int
    stages: int
    swapped: bool = False  # computes the transpose: outputs are the rows of a tensor core tile


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of one forward. ``rows``: pairs in a tile."""

    rows: int
    gated: ExpertTile
    down: ExpertTile


_Choice = tuple[int, ExpertTiles]  # the most pairs for each expert on average, and their tiles
_MOST = 1 << 30
_FLOAT32: tuple[_Choice, ...] = ((_MOST, ExpertTiles(16, ExpertTile(32, 32, 4, 2), ExpertTile(32, 32, 4, 2))),)
_FLOAT16: tuple[_Choice, ...] = (
    (8, ExpertTiles(16, ExpertTile(32, 256, 4, 4), ExpertTile(64, 128, 4, 4, swapped=True))),
    (16, ExpertTiles(32, ExpertTile(64, 128, 4, 3, swapped=True), ExpertTile(64, 128, 4, 4, swapped=True))),
    (64, ExpertTiles(64, ExpertTile(64, 64, 4, 3), ExpertTile(128, 64, 4, 4))),
    (_MOST, ExpertTiles(128, ExpertTile(128, 64, 8, 3), ExpertTile(256, 64, 8, 3))),
)
_FLOAT8: tuple[_Choice, ...] = (
    (8, ExpertTiles(16, ExpertTile(32, 256, 4, 4), ExpertTile(64, 256, 4, 3, swapped=True))),
    (32, ExpertTiles(32, ExpertTile(64, 128, 4, 3, swapped=True), ExpertTile(64, 128, 4, 4, swapped=True))),
    (128, ExpertTiles(64, ExpertTile(64, 128, 8, 3), ExpertTile(128, 128, 8, 3))),
    (_MOST, ExpertTiles(128, ExpertTile(64, 64, 8, 4), ExpertTile(128, 128, 8, 3))),
)
# For GPUs with less shared memory than Hopper; not tuned.
_SMALL: tuple[_Choice, ...] = (
    (16, ExpertTiles(16, ExpertTile(32, 128, 4, 4), ExpertTile(32, 128, 4, 4))),
    (_MOST, ExpertTiles(64, ExpertTile(64, 64, 4, 3), ExpertTile(64, 64, 4, 3))),
)
HOPPER_SHARED_BYTES = 227 << 10
"""Shared memory that a program may have on Hopper and on data-center Blackwell."""
# Of a deterministic runner, for the numbers of pairs whose own tiles sum in another order.
_FIXED = ExpertTiles(64, ExpertTile(64, 64, 4, 3), ExpertTile(128, 64, 4, 4))


def expert_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, shared_bytes: int) -> ExpertTiles:
    """Chooses the tiles. ``dtype``: of the weights. ``shared_bytes``: shared memory that a program may have."""
    return next(tiles for most, tiles in _choices(dtype, shared_bytes) if num_pairs <= most * num_experts)


def all_tiles(dtype: torch.dtype, shared_bytes: int) -> tuple[ExpertTiles, ...]:
    """Returns the tiles that :func:`expert_tiles` chooses from."""
    return tuple(tiles for _, tiles in _choices(dtype, shared_bytes))


def fixed_tiles(dtype: torch.dtype) -> ExpertTiles:
    """Returns tiles that suit any number of pairs. ``dtype``: of the weights."""
    return _FLOAT32[0][1] if dtype == torch.float32 else _FIXED


def _choices(dtype: torch.dtype, shared_bytes: int) -> tuple[_Choice, ...]:
    if dtype == torch.float32:
        return _FLOAT32
    if shared_bytes < HOPPER_SHARED_BYTES:
        return _SMALL
    return _FLOAT8 if dtype == FP8 else _FLOAT16

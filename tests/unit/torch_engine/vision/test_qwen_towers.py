"""Qwen's towers take pictures of any size: rows by grid, deepstack's vectors beside each row's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from trtx.checkpoint import resolve_checkpoint
from trtx.ipc.encoder_messages import EncoderArgs, Grid
from trtx.torch_engine.vision.load import load_tower
from trtx.torch_engine.vision.towers import Pixels, Tower, UnsuitableImage

pytestmark = pytest.mark.slow

HIDDEN = 128
PORTRAIT, LANDSCAPE = (1, 6, 4), (1, 4, 6)
GRIDS: list[Grid] = [PORTRAIT, LANDSCAPE, (1, 2, 2), (1, 20, 14), (1, 24, 24), (1, 2, 16), (2, 4, 4)]
COLUMNS = {"tiny-qwen2.5-vl": 3 * 2 * 14**2, "tiny-qwen3-vl": 3 * 2 * 16**2}
LEVELS = {"tiny-qwen2.5-vl": 0, "tiny-qwen3-vl": 2}


@pytest.fixture(scope="module", params=sorted(COLUMNS))
def model(request: pytest.FixtureRequest) -> tuple[str, Tower, Any]:
    directory: Path = resolve_checkpoint(f"synthetic:{request.param}").path
    theirs = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    return request.param, load_tower(EncoderArgs(model=str(directory))), theirs


def patches(name: str, grid: Grid, seed: int = 3) -> torch.Tensor:
    time, height, width = grid
    return torch.randn(time * height * width, COLUMNS[name], generator=torch.Generator().manual_seed(seed))


def rows_of(tower: Tower, items: list[Pixels]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return tower.encode(items)


def test_rows_are_those_of_the_whole_model(model: tuple[str, Tower, Any]) -> None:
    name, tower, theirs = model
    assert tower.width == HIDDEN * (1 + LEVELS[name])
    for some in (GRIDS[:1], GRIDS):
        pixels = [patches(name, grid, seed) for seed, grid in enumerate(some)]
        ours = rows_of(tower, [tower.check(one, grid) for one, grid in zip(pixels, some, strict=True)])
        with torch.no_grad():
            found = theirs.get_image_features(torch.cat(pixels), torch.tensor(some))
        for index, (grid, own) in enumerate(zip(some, ours, strict=True)):
            assert own.shape == (grid[0] * grid[1] * grid[2] // 4, tower.width)
            expected = [found.pooler_output[index]]
            for level in found.deepstack_features if LEVELS[name] else ():
                # transformers 5.17 has those of all items in one tensor
                apart = level.split([len(one) for one in ours]) if isinstance(level, torch.Tensor) else level
                expected.append(apart[index])
            torch.testing.assert_close(own, torch.cat(expected, 1), rtol=1e-5, atol=1e-5)


def test_a_batch_changes_no_more_than_a_rounding(model: tuple[str, Tower, Any]) -> None:
    name, tower, _ = model
    items = [tower.check(patches(name, grid, seed), grid) for seed, grid in enumerate(GRIDS)]
    together = rows_of(tower, items)
    for one, other in zip(items, together, strict=True):
        torch.testing.assert_close(rows_of(tower, [one])[0], other, rtol=1e-5, atol=1e-5)


def test_the_same_patches_lying_and_standing_have_other_rows(model: tuple[str, Tower, Any]) -> None:
    """A grid that is guessed from the number of rows would go unnoticed otherwise."""
    name, tower, _ = model
    standing, lying = (tower.check(patches(name, grid), grid) for grid in (PORTRAIT, LANDSCAPE))
    assert standing.rows == lying.rows == 6
    assert (tower.merged(PORTRAIT), tower.merged(LANDSCAPE)) == ((1, 3, 2), (1, 2, 3))
    one, other = rows_of(tower, [standing, lying])
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("rows", "more_columns", "grid"),
    [(24, 0, None), (24, 0, (1, 4, 4)), (24, 1, PORTRAIT), (24, 0, (1, 3, 8)), (0, 0, (0, 4, 6)), (6, 0, (1, 6, 1))],
)
def test_patches_that_do_not_fit_their_grid_are_refused(
    model: tuple[str, Tower, Any], rows: int, more_columns: int, grid: Grid | None
) -> None:
    name, tower, _ = model
    with pytest.raises(UnsuitableImage, match="expected"):
        tower.check(torch.zeros(rows, COLUMNS[name] + more_columns), grid)

"""Which pictures that wait are encoded together: small ones, in their order; a large one makes nobody wait for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from trtx.checkpoint import resolve_checkpoint
from trtx.ipc.encoder_messages import Encode, EncoderArgs, Grid
from trtx.ipc.shared_tensor import share
from trtx.torch_engine.vision.encoder import FULL_PATCHES, Encoder
from trtx.torch_engine.vision.load import load_tower

COLUMNS = 3 * 2 * 14**2
SMALL: Grid = (1, 4, 4)
LARGE: Grid = (1, 72, 72)  # 5,184 patches: a megapixel
HALF: Grid = (1, 64, 32)


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        ([SMALL] * 5, [5]),
        ([LARGE, LARGE], [1, 1]),
        ([SMALL, LARGE, SMALL, SMALL], [1, 1, 2]),
        ([HALF, HALF, HALF], [2, 1]),
    ],
    ids=["small", "large", "mixed", "two halves"],
)
def test_nothing_is_added_to_a_batch_that_keeps_the_device_busy(
    grids: list[Grid], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args = EncoderArgs(model=str(resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path))
    encoder = Encoder(load_tower(args), args)
    for item, grid in enumerate(grids):
        pixels = torch.zeros(grid[0] * grid[1] * grid[2], COLUMNS)
        assert encoder.submit(Encode(item, share(pixels), grid)) is None
    found: list[int] = []
    items: list[int] = []
    while not encoder.is_idle:
        answers = encoder.step()
        assert all(answer.rows is not None for answer in answers)
        found.append(len(answers))
        items += [answer.item_id for answer in answers]
    assert found == expected and items == [*range(len(grids))]
    assert 2 * HALF[1] * HALF[2] == FULL_PATCHES

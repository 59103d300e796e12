"""Qwen's towers on a GPU give transformers' own rows. Without a GPU: TRITON_INTERPRET=1 and the package triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import IS_INTERPRETED
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from trtx.checkpoint import resolve_checkpoint
from trtx.ipc.encoder_messages import EncoderArgs, Grid
from trtx.torch_engine.vision.load import load_tower
from trtx.torch_engine.vision.towers import Tower

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]

COLUMNS = {"tiny-qwen2.5-vl": 3 * 2 * 14**2, "tiny-qwen3-vl": 3 * 2 * 16**2}
GRIDS: list[Grid] = [(1, 6, 4), (1, 12, 14), (1, 2, 2), (2, 4, 4), (1, 16, 16)]
ONE_SIZE: list[Grid] = [(1, 16, 16), (1, 16, 16)]
# By relative norm, from transformers in float32 on the CPU. In bfloat16 a layer rounds some ten times by 2^-9.
DTYPES = {"float32": 1e-4} | ({} if IS_INTERPRETED else {"bfloat16": 0.03})  # bfloat16 products fail in the interpreter


@pytest.fixture
def rotations() -> Iterator[None]:
    """A process has one tower; what it changed in transformers is taken back."""
    kept = [(one, one.apply_rotary_pos_emb_vision) for one in (modeling_qwen2_5_vl, modeling_qwen3_vl)]
    yield
    for modeling, theirs in kept:
        modeling.apply_rotary_pos_emb_vision = theirs


def patches(name: str, grids: list[Grid]) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    return [torch.randn(time * height * width, COLUMNS[name], generator=dice) for time, height, width in grids]


def theirs(name: str, grids: list[Grid]) -> list[torch.Tensor]:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        resolve_checkpoint(f"synthetic:{name}").path, dtype=torch.float32
    )
    with torch.no_grad():
        found = model.eval().get_image_features(torch.cat(patches(name, grids)), torch.tensor(grids))
    rows = [time * height * width // 4 for time, height, width in grids]
    levels = [  # transformers 5.17 has those of all items in one tensor
        level.split(rows) if isinstance(level, torch.Tensor) else level
        for level in getattr(found, "deepstack_features", None) or ()
    ]
    return [torch.cat(vectors, 1) for vectors in zip(found.pooler_output, *levels, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grids", [GRIDS, ONE_SIZE])
@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_rows_are_those_of_the_whole_model(name: str, grids: list[Grid], dtype: str, rotations: None) -> None:
    expected = theirs(name, grids)
    tower: Tower = load_tower(EncoderArgs(model=str(resolve_checkpoint(f"synthetic:{name}").path), dtype=dtype))
    if IS_INTERPRETED:
        from trtx.torch_engine.vision.triton_tower import fuse

        fuse(tower._model.visual)
    else:
        assert tower.device.type == "cuda"
    with torch.inference_mode():
        items = [tower.check(one, grid) for one, grid in zip(patches(name, grids), grids, strict=True)]
        found = [rows.float().cpu() for rows in tower.encode(items)]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm() / other.norm()) < DTYPES[dtype]

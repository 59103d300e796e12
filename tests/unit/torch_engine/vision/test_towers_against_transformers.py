"""A tower without its decoder gives the rows that transformers' whole model gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import HIDDEN, ROWS, SIDE, picture, save_llava
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import DRAWN_WEIGHTS
from trtx.errors import UsageError
from trtx.ipc.encoder_messages import EncoderArgs
from trtx.torch_engine.vision.load import load_tower
from trtx.torch_engine.vision.towers import Tower, UnsuitableImage

pytestmark = pytest.mark.slow


def rows_of(tower: Tower, *pictures: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return tower.encode([tower.check(one, None) for one in pictures])


def whole_rows(model: LlavaForConditionalGeneration, *pictures: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model.get_image_features(torch.cat(pictures)).pooler_output)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_llava(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, ROWS),
        ({"vision_feature_select_strategy": "full"}, ROWS + 1),
        ({"vision_feature_layer": 1}, ROWS),
        ({"vision_feature_layer": [-1, 1]}, ROWS),
        ({"multimodal_projector_bias": False, "projector_hidden_act": "silu"}, ROWS),
    ],
)
def test_rows_are_bit_for_bit_those_of_the_whole_model(tmp_path: Path, changed: dict[str, Any], rows: int) -> None:
    model = save_llava(tmp_path, **changed)
    tower = load_tower(EncoderArgs(model=str(tmp_path)))
    pictures = [picture(seed) for seed in range(5)]
    for some in (pictures[:1], pictures):
        ours, theirs = rows_of(tower, *some), whole_rows(model, *some)
        for own, their in zip(ours, theirs, strict=True):
            assert own.shape == (rows, HIDDEN) and own.dtype == torch.float32
            assert torch.equal(own, their)
    assert (ours[0] - ours[1]).abs().max() > 0.1  # so that another picture's rows would be noticed


def test_a_batch_changes_no_more_than_a_rounding(checkpoint: Path) -> None:
    """How BLAS cuts a product depends on its size: equality to the last bit is not promised."""
    tower = load_tower(EncoderArgs(model=str(checkpoint)))
    pictures = [picture(seed) for seed in range(9)]
    together = rows_of(tower, *pictures)
    for one, other in zip(pictures, together, strict=True):
        torch.testing.assert_close(rows_of(tower, one)[0], other, rtol=1e-5, atol=1e-5)


def test_the_decoders_dtype_is_taken_when_it_is_asked_for(checkpoint: Path) -> None:
    theirs = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    tower = load_tower(EncoderArgs(model=str(checkpoint), dtype="bfloat16"))
    (own,) = rows_of(tower, picture(1))
    assert own.dtype == torch.bfloat16
    assert torch.equal(own, whole_rows(theirs, picture(1).bfloat16())[0])


def test_names_of_older_and_newer_checkpoints_are_read(checkpoint: Path, tmp_path: Path) -> None:
    """llava-hf's files were written before CLIP's tower lost an inner prefix; others have ``model.`` before all."""
    expected = rows_of(load_tower(EncoderArgs(model=str(checkpoint))), picture(3))[0]
    stored = load_file(checkpoint / "model.safetensors")
    for begin, instead in (("vision_tower.", "vision_tower.vision_model."), ("", "model.")):
        renamed = {
            (instead + name.removeprefix(begin) if name.startswith(("vision_tower.", "multi_modal")) and
             name.startswith(begin) else name): value
            for name, value in stored.items()
        }  # fmt: skip
        renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(5)  # a buffer, as it was stored
        save_file(renamed, checkpoint / "model.safetensors")
        assert torch.equal(rows_of(load_tower(EncoderArgs(model=str(checkpoint))), picture(3))[0], expected)


def test_only_files_with_the_towers_tensors_are_read(checkpoint: Path) -> None:
    expected = rows_of(load_tower(EncoderArgs(model=str(checkpoint))), picture(3))[0]
    stored = load_file(checkpoint / "model.safetensors")
    tower = {name: value for name, value in stored.items() if not name.startswith("language_model.")}
    (checkpoint / "model.safetensors").unlink()
    save_file(tower, checkpoint / "two.safetensors")
    decoder = {name: value for name, value in stored.items() if name not in tower}
    save_file(decoder, checkpoint / "one.safetensors")
    # safetensors refuses to open a file with a byte behind its data, so no tensor of it can have been read.
    with (checkpoint / "one.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(SafetensorError):
        load_file(checkpoint / "one.safetensors")
    index = dict.fromkeys(decoder, "one.safetensors") | dict.fromkeys(tower, "two.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(rows_of(load_tower(EncoderArgs(model=str(checkpoint))), picture(3))[0], expected)


def test_weights_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    for changed, said in (
        ({"vision_tower.post_layernorm.bias": None}, "lacks 1 tensors of the vision tower"),
        ({"vision_tower.post_layernorm.bias": torch.zeros(3)}, "float of shape \\[24\\]"),
        ({"vision_tower.post_layernorm.bias": torch.zeros(24, dtype=torch.int8)}, "is torch.int8"),
        ({"vision_tower.more.weight": torch.zeros(3)}, "has no such tensor"),
    ):
        tensors = {name: value for name, value in (stored | changed).items() if value is not None}
        save_file(tensors, checkpoint / "model.safetensors")
        with pytest.raises(UsageError, match=said):
            load_tower(EncoderArgs(model=str(checkpoint)))


def test_weights_are_drawn_where_none_are_stored(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no safetensors weights"):
        load_tower(EncoderArgs(model=str(checkpoint)))
    config = json.loads((checkpoint / "config.json").read_text())

    def drawn(seed: int) -> torch.Tensor:
        (checkpoint / "config.json").write_text(json.dumps(config | {DRAWN_WEIGHTS: {"seed": seed, "init_std": 0.3}}))
        rows: torch.Tensor = rows_of(load_tower(EncoderArgs(model=str(checkpoint))), picture(1))[0]
        return rows

    first = drawn(7)
    assert torch.equal(first, drawn(7)) and not torch.equal(first, drawn(8))
    assert first.isfinite().all() and first.abs().max() > 0


@pytest.mark.parametrize(
    ("values", "grid"),
    [
        (torch.zeros(3, SIDE, SIDE), None),
        (torch.zeros(2, 3, SIDE, SIDE), None),
        (torch.zeros(1, 3, SIDE, SIDE + 1), None),
        (torch.zeros(1, 4, SIDE, SIDE), None),
        (torch.zeros(0), None),
        (torch.zeros(1, 3, SIDE, SIDE), (1, 4, 4)),
    ],
)
def test_pixels_of_another_shape_are_refused(
    checkpoint: Path, values: torch.Tensor, grid: tuple[int, int, int] | None
) -> None:
    with pytest.raises(UnsuitableImage, match="expected 1 x 3 x 28 x 28 and no grid"):
        load_tower(EncoderArgs(model=str(checkpoint))).check(values, grid)


def test_a_text_model_has_no_tower() -> None:
    with pytest.raises(UsageError, match="has no vision tower"):
        load_tower(EncoderArgs(model=str(resolve_checkpoint("synthetic:tiny").path)))

"""``preprocessor_config.json`` beside a config.json: what it makes of a picture has to be what the tower takes."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.documents import Fields, read_object

PROCESSOR = "preprocessor_config.json"
# transformers' defaults of the Qwen2-VL image processor (5.23), and what the tower calls them.
_QWEN = {"patch_size": ("patch_size", 14), "merge_size": ("spatial_merge_size", 2),
         "temporal_patch_size": ("temporal_patch_size", 2)}  # fmt: skip
_LARGEST = 1 << 14


def check_processor(model_dir: Path, tower: Fields) -> None:
    """``tower``: ``vision_config``. Raises UsageError where pictures come out in other sizes than it takes: its first
    picture would fail, or one row would stand for another part of it. A directory without the file passes."""
    if not (model_dir / PROCESSOR).is_file():
        return
    stated = Fields(read_object(model_dir / PROCESSOR, "an image processor's options"), str(model_dir / PROCESSOR))
    if tower.has("image_size"):
        _check_size(stated, tower.count("image_size", most=_LARGEST))
        return
    for name, (of_tower, silent) in _QWEN.items():
        wanted = tower.count(of_tower, most=_LARGEST)
        if (stated.count(name, most=_LARGEST) if stated.has(name) else silent) != wanted:
            stated.refuse(name, f"{wanted}, {of_tower} of the tower in config.json")


def _check_size(stated: Fields, wanted: int) -> None:
    """CLIP's: what is cropped last decides, else what is resized to."""
    name = "crop_size" if stated.flag("do_center_crop", missing=True) else "size"
    value = stated.values.get(name)
    sides = [value.get("height"), value.get("width")] if isinstance(value, dict) else [value, value]
    if name == "size" and not isinstance(value, dict):  # one number is the shorter side's
        sides = [None]
    if sides != [wanted, wanted]:
        stated.refuse(name, f'{{"height": {wanted}, "width": {wanted}}}, image_size of the tower in config.json')

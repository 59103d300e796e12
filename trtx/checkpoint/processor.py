"""A checkpoint's image processor: what it makes of a picture has to be what the tower of config.json takes."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.documents import Fields, read_object

PROCESSOR, _WHOLE_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
# Defaults of transformers' image processors (5.23): Qwen2-VL's, with the tower's names for the same, and the crop of
# CLIP's and LLaVA's. test_class_defaults.py holds them to the installed classes.
QWEN = {"patch_size": ("patch_size", 14), "merge_size": ("spatial_merge_size", 2),
        "temporal_patch_size": ("temporal_patch_size", 2)}  # fmt: skip
CROP = {"height": 224, "width": 224}
_LARGEST = 1 << 14


def check_processor(model_dir: Path, tower: Fields) -> None:
    """``tower``: ``vision_config``. Raises UsageError where pictures come out in other sizes than it takes: its first
    picture would fail, or one row would stand for another part of it. A directory without a processor passes."""
    stated = _stated(model_dir)
    if stated is None:
        return
    if tower.has("image_size"):
        _check_size(stated, tower.count("image_size", most=_LARGEST))
        return
    for name, (of_tower, silent) in QWEN.items():
        wanted = tower.count(of_tower, most=_LARGEST)
        if (stated.count(name, most=_LARGEST) if stated.has(name) else silent) != wanted:
            stated.refuse(name, f"{wanted}, {of_tower} of the tower in config.json")


def _stated(model_dir: Path) -> Fields | None:
    """Where transformers looks: nested in processor_config.json, as it writes it since 5.0, else a file of its own."""
    whole = model_dir / _WHOLE_PROCESSOR
    if whole.is_file():
        nested = Fields(read_object(whole, "a processor's options"), str(whole)).inner(_NESTED)
        if nested is not None:
            return nested
    own = model_dir / PROCESSOR
    return Fields(read_object(own, "an image processor's options"), str(own)) if own.is_file() else None


def _check_size(stated: Fields, wanted: int) -> None:
    """CLIP's: what is cropped last decides, else what is resized to."""
    name = "crop_size" if stated.flag("do_center_crop", missing=True) else "size"
    value = stated.values.get(name, CROP if name == "crop_size" else None)
    sides = [value.get("height"), value.get("width")] if isinstance(value, dict) else [value, value]
    if name == "size" and not isinstance(value, dict):  # one number is the shorter side's
        sides = [None]
    if sides != [wanted, wanted]:
        stated.refuse(name, f'{{"height": {wanted}, "width": {wanted}}}, image_size of the tower in config.json')

"""Checks that a checkpoint's image processor produces images of the sizes that the vision tower takes."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.documents import Fields, read_object

PROCESSOR, _WHOLE_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
# Defaults of transformers' image processors (5.23): those of Qwen2-VL with the tower's name for each field, and the
# crop size of CLIP and LLaVA. test_class_defaults.py compares them with the installed classes.
QWEN = {"patch_size": ("patch_size", 14), "merge_size": ("spatial_merge_size", 2),
        "temporal_patch_size": ("temporal_patch_size", 2)}  # fmt: skip
CROP = {"height": 224, "width": 224}
_LARGEST = 1 << 14


def check_processor(model_dir: Path, tower: Fields) -> None:
    """Raises UsageError if the image processor produces other sizes than the tower takes.

    With such a mismatch the first image would fail, or an embedding row would represent another part of the image.
    ``tower``: ``vision_config``. A directory without an image processor passes.
    """
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
    """Returns the image processor's options from where transformers reads them; None if there are none.

    They are nested in processor_config.json, as transformers writes them since 5.0, else in preprocessor_config.json.
    """
    whole = model_dir / _WHOLE_PROCESSOR
    if whole.is_file():
        nested = Fields(read_object(whole, "a processor's options"), str(whole)).inner(_NESTED)
        if nested is not None:
            return nested
    own = model_dir / PROCESSOR
    return Fields(read_object(own, "an image processor's options"), str(own)) if own.is_file() else None


def _check_size(stated: Fields, wanted: int) -> None:
    """Checks CLIP's image size: the size of the center crop, or without a crop the size after resizing."""
    name = "crop_size" if stated.flag("do_center_crop", missing=True) else "size"
    value = stated.values.get(name, CROP if name == "crop_size" else None)
    sides = [value.get("height"), value.get("width")] if isinstance(value, dict) else [value, value]
    if name == "size" and not isinstance(value, dict):  # one number is the length of the shorter side
        sides = [None]
    if sides != [wanted, wanted]:
        stated.refuse(name, f'{{"height": {wanted}, "width": {wanted}}}, image_size of the tower in config.json')

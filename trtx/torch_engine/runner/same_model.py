"""Whether another checkpoint's weights can take the place of loaded ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.errors import UsageError

_OF_VALUES = frozenset({"synthetic_seed", "synthetic_std", "dtype", "quantization.source"})
"""Fields that decide about a weight's value or its place alone, or about its dtype in the file."""


def read_same_config(model_dir: Path, loaded: ModelConfig) -> ModelConfig:
    """Reads a checkpoint's config. Raises UsageError unless it describes the decoder of the loaded model."""
    if loaded.vision is not None:
        raise UsageError(
            "the weights of a model with images can't be updated in place, since its vision tower would keep the old "
            f"ones; start {model_dir} instead"
        )
    found = read_model_config(model_dir)
    for name, theirs, ours in _differences("", found, loaded):
        raise UsageError(
            f"the weights of {model_dir} differ from the loaded model's: its {name} is {theirs}, and {ours} in the "
            "loaded one; give a checkpoint of the same config"
        )
    return found


def _differences(prefix: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    for field in fields(one):
        name, theirs, ours = f"{prefix}{field.name}", getattr(one, field.name), getattr(other, field.name)
        if theirs == ours or name in _OF_VALUES:
            continue
        if is_dataclass(theirs) and type(theirs) is type(ours):
            yield from _differences(f"{name}.", theirs, ours)
        else:
            yield name, theirs, ours

"""Whether another checkpoint's weights can take the place of loaded ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.errors import UsageError

_OF_VALUES = frozenset({"synthetic_seed", "synthetic_std", "dtype"})
"""Fields that decide about a weight's value, or about its dtype in the file, alone."""


def read_same_config(model_dir: Path, loaded: ModelConfig) -> ModelConfig:
    """Reads a checkpoint's config. Raises UsageError unless its decoder computes what the loaded one computes."""
    if loaded.vision is not None:
        raise UsageError(
            f"the weights of a model with images can't be updated in place, since its vision tower would keep the old "
            f"ones; start {model_dir} instead"
        )
    found = read_model_config(model_dir)
    for field in fields(ModelConfig):
        ours, theirs = getattr(loaded, field.name), getattr(found, field.name)
        if ours != theirs and field.name not in _OF_VALUES:
            raise UsageError(
                f"the weights of {model_dir} don't fit: its {field.name} is {theirs}, and {ours} in the loaded model; "
                "give a checkpoint of the same config"
            )
    return found

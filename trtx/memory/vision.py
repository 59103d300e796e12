"""Estimates the number of parameters of a vision tower from its ``vision_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GATED = ("qwen2_5_vl", "qwen2_5_vl_vision")  # their MLP has three matrices; the other towers' has two


def vision_parameters(config: Mapping[str, Any] | None, text_hidden: int) -> int:
    """Returns the parameters of blocks, patch embedding and projector; 0 without a tower.

    The result is within a few percent of the published counts.
    """
    if not config:
        return 0
    hidden = int(config.get("hidden_size") or 0)
    depth = int(config.get("depth") or config.get("num_hidden_layers") or 0)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    matrices = 3 if config.get("model_type") in _GATED else 2
    blocks = depth * (4 * hidden * hidden + matrices * hidden * inner)
    patch = int(config.get("patch_size") or config.get("spatial_patch_size") or 14)
    embedding = 3 * int(config.get("temporal_patch_size") or 1) * patch * patch * hidden
    merged = hidden * int(config.get("spatial_merge_size") or 1) ** 2
    projectors = 1 + len(config.get("deepstack_visual_indexes") or ())
    return blocks + embedding + projectors * (merged * merged + merged * text_hidden)

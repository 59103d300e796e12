"""What pictures and videos take of a device beside a decoder: a process with the tower, and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.facts import read_config
from trtx.checkpoint.formats import DTYPE_BYTES
from trtx.checkpoint.model_config import read_model_config
from trtx.memory import torch_engine
from trtx.memory.gpus import Device
from trtx.memory.reserves import process_bytes

ARENA_BYTES = 512 << 20
"""Of a GPU, for embeddings that stay there: the torch engine's own, which is not imported here."""
_RGB = 3


@dataclass(frozen=True, slots=True)
class Media:
    """What a worker of a model that sees has on its device. ``has_encoder``: one of its own, started before its engine.
    ``embedding_bytes``: of embeddings that it holds at most. ``shared_bytes``: of encode workers that are on the device
    too, their largest batches included: they may start after the worker's engine."""

    has_encoder: bool
    embedding_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """Of one encoder's process. ``batch_bytes``: while it computes its largest batch, estimated. ``arena_bytes``: for
    embeddings that stay on its GPU."""

    weight_bytes: int
    context_bytes: int
    batch_bytes: int
    arena_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.context_bytes + self.batch_bytes + self.arena_bytes


def arena_bytes(device: Device) -> int:
    """That an encoder's process keeps there."""
    return ARENA_BYTES if device.is_gpu else 0


def encoder_share(directory: Path, values: Mapping[str, Any], device: Device, *, max_num_tokens: int) -> EncoderShare:
    """``values``: of its engine config. ``max_num_tokens``: rows of a batch. Raises UsageError as the engine does."""
    config, model = read_config(directory), read_model_config(directory)
    assert model.vision is not None, "an encoder's model sees"
    dtype = torch_engine.compute_dtype(values.get("dtype") or "auto", model.dtype, is_gpu=device.is_gpu)
    tower = config["vision_config"]
    hidden = int(tower["hidden_size"])
    inner = int(tower.get("intermediate_size") or 4 * hidden)
    patch = int(tower.get("patch_size") or 0)
    columns = _RGB * model.vision.temporal_patch * patch**2
    # A patch's pixels, the residual and its norm, and the widest of what a block makes of it.
    of_patch = columns + 2 * hidden + max(3 * inner, 4 * hidden)
    patches = max_num_tokens * model.vision.spatial_merge**2
    width = DTYPE_BYTES[dtype]
    rows = max_num_tokens * model.vision.columns
    return EncoderShare(
        weight_bytes=torch_engine.tower_bytes(config, dtype),
        context_bytes=process_bytes(device),
        batch_bytes=(patches * of_patch + rows) * width,
        arena_bytes=arena_bytes(device),
    )

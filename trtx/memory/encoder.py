"""The device memory for images and videos in addition to the decoder's: the encoder process, and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.facts import read_config
from trtx.checkpoint.formats import DTYPE_BYTES
from trtx.checkpoint.model_config import read_model_config
from trtx.memory import torch_engine
from trtx.memory.gpus import MemoryDevice
from trtx.memory.reserves import process_bytes

ARENA_BYTES = 512 << 20
"""GPU memory for embeddings that stay on the encoder's GPU. The torch engine has the same constant, which this room
may not import."""
_RGB = 3


@dataclass(frozen=True, slots=True)
class MediaMemory:
    """The memory for multimodal inputs on the device of a worker.

    ``has_encoder``: the worker has its own encoder process, which starts before the engine. ``embedding_bytes``: the
    maximum of the embeddings that the worker holds. ``shared_bytes``: the memory of encode workers on the same device,
    including their largest batches, because they may start after the worker's engine.
    """

    has_encoder: bool
    embedding_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """The device memory of one encoder process.

    ``batch_bytes``: an estimate of the peak during its largest batch. ``arena_bytes``: for embeddings that stay on its
    GPU.
    """

    weight_bytes: int
    context_bytes: int
    batch_bytes: int
    arena_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.context_bytes + self.batch_bytes + self.arena_bytes


def arena_bytes(device: MemoryDevice) -> int:
    """Returns the memory that an encoder process reserves on ``device`` for embeddings; 0 on a CPU."""
    return ARENA_BYTES if device.is_gpu else 0


def encoder_share(
    directory: Path, values: Mapping[str, Any], device: MemoryDevice, *, max_num_tokens: int
) -> EncoderShare:
    """Computes the memory of an encoder process.

    ``values``: its engine config. ``max_num_tokens``: the rows of its largest batch. Raises the engine's UsageErrors.
    """
    config, model = read_config(directory), read_model_config(directory)
    assert model.vision is not None, "an encoder's model sees"
    dtype = torch_engine.compute_dtype(values.get("dtype") or "auto", model.dtype, is_gpu=device.is_gpu)
    tower = config["vision_config"]
    hidden = int(tower["hidden_size"])
    inner = int(tower.get("intermediate_size") or 4 * hidden)
    patch = int(tower.get("patch_size") or 0)
    columns = _RGB * model.vision.temporal_patch * patch**2
    # The pixels of a patch, the residual and its norm, and the widest intermediate of a block.
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

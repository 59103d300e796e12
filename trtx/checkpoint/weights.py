"""Seeded random values for the tensors of a small dense checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from trtx.checkpoint.dense import EMBEDDING, HEAD, checkpoint_tensors
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.vision import stored_name

if TYPE_CHECKING:  # 0.1 s that a reader of config.json need not pay
    import numpy as np
    import numpy.typing as npt

    FLOATS = npt.NDArray[np.float32]

# Relative size of an embedding row: small enough that the tied head does not simply repeat the last token, since the
# layers' outputs then outweigh the embedding in the residual stream.
EMBEDDING_STD = 0.25
# Fragments (bytes, special tokens) get short rows: as inputs the first norm gives them full strength, as outputs they
# never win, so a random model speaks in words and does not end by itself.
FRAGMENT_SCALE = 0.05


def write_random_weights(
    config: ModelConfig,
    tower: Mapping[str, tuple[int, ...]],
    fragment_ids: Sequence[int],
    seed: int,
    path: Path,
) -> None:
    """Writes float32 safetensors, the same bytes for the same arguments (numpy's Philox, a stream per name).

    ``tower``: shapes of a vision tower's tensors by stored name, empty without one.
    """
    import numpy as np
    from safetensors.numpy import save_file

    tensors: dict[str, FLOATS] = {}
    for name, stored in checkpoint_tensors(config).items():
        tensors[name] = _draw(name, stored.shape, seed)
        if name in (EMBEDDING, HEAD):
            tensors[name][list(fragment_ids)] *= np.float32(FRAGMENT_SCALE)
    tensors = {stored_name(config.architecture, name): value for name, value in tensors.items()}
    tensors |= {name: _draw_tower(name, shape, seed) for name, shape in tower.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600


def _draw(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    import numpy as np

    values = _normal(name, shape, seed)
    if name.endswith("norm.weight"):
        # Around 1, not 1: a runner that forgets a norm's weight must be caught. Twice that for q and k, so that
        # attention picks some tokens out instead of averaging all.
        center = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        return np.asarray(center + 0.2 * values, dtype=np.float32)
    if name.endswith(".bias"):
        return np.asarray(0.5 * values, dtype=np.float32)
    std = EMBEDDING_STD if name in (EMBEDDING, HEAD) else 1.0 / sqrt(shape[-1])
    return np.asarray(std * values, dtype=np.float32)


def _draw_tower(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    """Norms around 1; the rest by what a product sums over, so that pictures differ in every row."""
    import numpy as np

    values = _normal(name, shape, seed)
    if "norm" in name and name.endswith(".weight"):
        return np.asarray(1.0 + 0.2 * values, dtype=np.float32)
    std = 1.0 / sqrt(prod(shape[1:])) if name.endswith(".weight") and "position_embedding" not in name else 0.2
    return np.asarray(std * values, dtype=np.float32)


def _normal(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    import numpy as np

    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)

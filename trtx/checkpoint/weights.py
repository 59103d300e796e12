"""Generates seeded random weights for a small dense checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from trtx.checkpoint.dense import EMBEDDING, HEAD, checkpoint_tensors
from trtx.checkpoint.experts import ExpertConfig, stack_place
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.vision import stored_name

if TYPE_CHECKING:  # importing numpy takes 0.1 s, which code that only reads config.json should not pay
    import numpy as np
    import numpy.typing as npt

    FLOATS = npt.NDArray[np.float32]

# The relative size of an embedding row. It is small enough that the layers' outputs outweigh the embedding in the
# residual stream, so a model with a tied head does not simply repeat the last token.
EMBEDDING_STD = 0.25
# Fragments (bytes, special tokens) get short rows. As inputs the first norm restores their magnitude; as outputs they
# never win, so a random model generates words and no end token.
FRAGMENT_SCALE = 0.05


def write_random_weights(
    config: ModelConfig,
    tower: Mapping[str, tuple[int, ...]],
    fragment_ids: Sequence[int],
    seed: int,
    path: Path,
) -> None:
    """Writes float32 safetensors whose bytes depend only on the arguments (numpy's Philox, one stream per name).

    ``tower``: the shapes of the vision tower's tensors by stored name; empty without a tower.
    """
    import numpy as np
    from safetensors.numpy import save_file

    tensors: dict[str, FLOATS] = {}
    for name, stored in checkpoint_tensors(config).items():
        tensors[name] = _draw(name, stored.shape, seed)
        if name in (EMBEDDING, HEAD):
            tensors[name][list(fragment_ids)] *= np.float32(FRAGMENT_SCALE)
    if config.experts is not None and config.experts.is_interleaved:
        tensors = _interleaved(tensors, config.experts, config.hidden_size)
    tensors = {stored_name(config.architecture, name): value for name, value in tensors.items()}
    tensors |= {name: _draw_tower(name, shape, seed) for name, shape in tower.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600


def _interleaved(tensors: Mapping[str, FLOATS], experts: ExpertConfig, hidden: int) -> dict[str, FLOATS]:
    """Joins the tensors of single experts to those of all experts of a layer, as transformers saves a gpt-oss."""
    import numpy as np

    found: dict[str, FLOATS] = {}
    stacks: dict[str, FLOATS] = {}
    for name, value in tensors.items():
        place = stack_place(experts, hidden, name)
        if place is None:
            found[name] = value
        else:
            stacks.setdefault(place.stack, np.empty(place.shape, np.float32))[place.index] = value
    for name, stack in stacks.items():
        count, rows = stack.shape[:2]
        if "gate_up" in name:  # from rows of gate, then of up, to one of each in turn
            stack = stack.reshape(count, 2, rows // 2, -1).swapaxes(1, 2).reshape(stack.shape)
        if name.endswith(".bias"):
            found[f"{name.removesuffix('.bias')}_bias"] = stack
        else:
            found[name] = np.ascontiguousarray(stack.swapaxes(1, 2))
    return found


def _draw(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    import numpy as np

    values = _normal(name, shape, seed)
    if name.endswith("norm.weight"):
        # Around 1, but not exactly 1, so that tests detect a runner that ignores the weight. Around 2 for q and k, so
        # that attention selects some tokens instead of averaging all.
        center = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        return np.asarray(center + 0.2 * values, dtype=np.float32)
    if name.endswith(".sinks"):  # wide, so that some heads attend to little
        return np.asarray(2.0 * values, dtype=np.float32)
    if name.endswith(".bias"):
        return np.asarray(0.5 * values, dtype=np.float32)
    std = EMBEDDING_STD if name in (EMBEDDING, HEAD) else 1.0 / sqrt(shape[-1])
    return np.asarray(std * values, dtype=np.float32)


def _draw_tower(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    """Draws a tensor of the tower: norms around 1, other weights scaled by their fan-in, so that images differ in
    every row."""
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

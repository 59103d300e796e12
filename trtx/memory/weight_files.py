"""Reads the exact sizes of a checkpoint's weights from the headers of its safetensors files, without the tensors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trtx.checkpoint.weight_index import stored_tensors

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|multi_modal_projector|mm_projector)\b")
# The first match wins. All other tensors are replicated on every GPU.
_SPLITS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"norm|router|mlp\.gate\.|input_scale|shared_expert_gate"), "whole"),
    (re.compile(r"q_a_proj|kv_a_proj"), "latent"),
    (re.compile(r"attn\.(?:k_proj|v_proj)"), "kv_heads"),
    (re.compile(r"attn"), "heads"),
    (re.compile(r"(?<!shared_)experts\."), "experts"),
    (re.compile(r"mlp|feed_forward|shared_expert"), "mlp"),
)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Bytes by kind of sharding. ``layers`` after the decoder's own are draft layers (DeepSeek's MTP)."""

    layers: dict[int, Counter[str]]
    embedding: int
    head: int
    vision: int
    other: int  # outside any layer: the final norm
    files: int


def stored_weights(directory: Path) -> StoredWeights | None:
    """Returns the sizes of the stored weights; None if there are no safetensors files or not all of them.

    Raises UsageError for an invalid file.
    """
    tensors = stored_tensors(directory)
    if tensors is None:
        return None
    layers: dict[int, Counter[str]] = {}
    outside: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if _VISION.search(name):
            outside["vision"] += tensor.nbytes
        elif found := _LAYER.search(name):
            layers.setdefault(int(found.group(1)), Counter())[_split(name)] += tensor.nbytes
        else:
            outside["head" if "lm_head" in name else "embedding" if "embed" in name else "other"] += tensor.nbytes
    files = len({tensor.file for tensor in tensors.values()})
    return StoredWeights(
        layers, outside["embedding"], outside["head"], outside["vision"], outside["other"], files=files
    )


def _split(name: str) -> str:
    return next((split for pattern, split in _SPLITS if pattern.search(name)), "whole")

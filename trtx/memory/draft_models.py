"""The memory of a draft model in the torch engine: weights, and KV beside each block of the target model's pool."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from trtx.checkpoint.drafts import EAGLE3, read_eagle_config
from trtx.checkpoint.formats import DTYPE_BYTES, NO_PRODUCTS
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.weight_index import stored_tensors
from trtx.memory.torch_engine import RESERVE_BYTES, activation_bytes, layer_bytes, vocabulary_bytes


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """``fixed_bytes``: weights, activations and CUDA graphs. ``token_bytes``: for each token of the KV pool."""

    fixed_bytes: int = 0
    token_bytes: int = 0


NO_DRAFT_MODEL = DraftMemory()


def draft_memory(
    directory: Path, kind: str, target: ModelConfig, *, layers: list[int] | None, dtype: str, max_num_tokens: int,
    max_batch_size: int,
) -> DraftMemory:  # fmt: skip
    """Returns the memory of the draft model in ``directory``. ``dtype``: the engine's. Raises UsageError."""
    width = DTYPE_BYTES[dtype]
    if kind == EAGLE3:
        config = read_eagle_config(directory, target, layers=layers).decoder
        stored = sum(prod(tensor.shape) for tensor in (stored_tensors(directory) or {}).values()) * width
        return DraftMemory(
            stored + max_num_tokens * 8 * config.hidden_size * width + RESERVE_BYTES // 4,
            (2 * config.kv_size + config.hidden_size) * width,
        )
    config = read_model_config(directory)
    weights = vocabulary_bytes(config, dtype) * (1 if config.tied_head else 2) + sum(
        layer_bytes(config, layer, dtype=dtype, scaled_products=NO_PRODUCTS, stored=None)
        for layer in range(config.num_layers)
    )
    activations = activation_bytes(
        config, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size, dtype=dtype, scaled_products=NO_PRODUCTS
    )
    return DraftMemory(weights + activations + RESERVE_BYTES // 2, 2 * config.num_layers * config.kv_size * width)

"""Which tensors a dense Qwen3, Qwen2.5 or Llama 3 checkpoint holds, and seeded random values for the small ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape (``[out, in]``), in Hugging Face's names and order of use."""
    hidden, inner, head = int(config["hidden_size"]), int(config["intermediate_size"]), head_dim_of(config)
    query = int(config["num_attention_heads"]) * head
    key = int(config["num_key_value_heads"]) * head
    biased = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (int(config["vocab_size"]), hidden)}
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for part, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
            if biased:
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, query)
        if config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = (head,)
            shapes[at + "self_attn.k_norm.weight"] = (head,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (int(config["vocab_size"]), hidden)
    return shapes


def parameter_count(config: Mapping[str, Any]) -> int:
    return sum(prod(shape) for shape in parameter_shapes(config).values())


def write_random_weights(config: Mapping[str, Any], fragment_ids: Sequence[int], seed: int, path: Path) -> None:
    """Writes float32 safetensors, the same bytes for the same arguments (numpy's Philox, a stream per name)."""
    import numpy as np
    from safetensors.numpy import save_file

    tensors: dict[str, FLOATS] = {}
    for name, shape in parameter_shapes(config).items():
        tensors[name] = _draw(name, shape, seed)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][list(fragment_ids)] *= np.float32(FRAGMENT_SCALE)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600


def _draw(name: str, shape: tuple[int, ...], seed: int) -> FLOATS:
    import numpy as np

    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        # Around 1, not 1: a runner that forgets a norm's weight must be caught. Twice that for q and k, so that
        # attention picks some tokens out instead of averaging all.
        center = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        return np.asarray(center + 0.2 * values, dtype=np.float32)
    if name.endswith(".bias"):
        return np.asarray(0.5 * values, dtype=np.float32)
    std = EMBEDDING_STD if len(shape) == 2 and name.startswith(("model.embed", "lm_head")) else 1.0 / sqrt(shape[-1])
    return np.asarray(std * values, dtype=np.float32)

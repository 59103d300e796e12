"""What the rest of trtx needs to know of a checkpoint without opening its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.weights import head_dim_of, parameter_count
from trtx.errors import UsageError

# The key of config.json that says "no weights here: draw them", with their seed and standard deviation.
DRAWN_WEIGHTS = "trtx_synthetic"

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face directory, ready to serve.

    ``path``: directory with ``config.json`` and tokenizer; safetensors too when ``has_weights``, else
    ``config.json`` carries ``trtx_synthetic: {seed, init_std}`` and the engine draws the weights.
    ``context_length``: the most tokens, prompt and output together, that the positions allow.
    ``architecture``: as in ``config.json``, such as ``Qwen3ForCausalLM``; ``family``: its ``model_type``.
    ``weight_bytes``: of all parameters in ``dtype`` (of the files, where they are stored).
    ``kv_bytes_per_token``: keys and values of all layers in ``dtype``.
    """

    path: Path
    served_model_name: str
    context_length: int
    architecture: str
    family: str
    dtype: str
    has_weights: bool
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameter_count: int
    weight_bytes: int
    kv_bytes_per_token: int


def read_checkpoint(path: Path, served_model_name: str) -> Checkpoint:
    """Reads ``config.json`` of a directory. Raises UsageError where it is no decoder-only text model."""
    config = read_config(path)
    try:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        facts = {**config, "num_key_value_heads": kv_heads}
        head_dim, layers, parameters = head_dim_of(facts), int(config["num_hidden_layers"]), parameter_count(facts)
        context_length, vocab_size = int(config["max_position_embeddings"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path / 'config.json'} lacks or garbles the field {error}; expected a decoder-only text model in "
            "Hugging Face form (Qwen3, Qwen2.5 or Llama 3)"
        ) from error
    width = _DTYPE_BYTES.get(dtype, 2)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Checkpoint(
        path=path,
        served_model_name=served_model_name,
        context_length=context_length,
        architecture=str((config.get("architectures") or [config.get("model_type", "unknown")])[0]),
        family=str(config.get("model_type", "unknown")),
        dtype=dtype,
        has_weights=stored > 0,
        vocab_size=vocab_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        parameter_count=parameters,
        weight_bytes=stored or parameters * width,
        kv_bytes_per_token=layers * 2 * kv_heads * head_dim * width,
    )


def read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'config.json'} cannot be read ({error}); expected a Hugging Face config") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path / 'config.json'} holds a {type(config).__name__}; expected a JSON object")
    return config

"""What the rest of trtx needs to know of a checkpoint without opening its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.weights import parameter_count
from trtx.errors import UsageError

# The key of config.json that says "no weights here: draw them", with their seed and standard deviation.
DRAWN_WEIGHTS = "trtx_synthetic"

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face directory, ready to serve.

    ``path``: directory with ``config.json`` and tokenizer; safetensors too when ``has_weights``, else
    ``config.json`` carries ``trtx_synthetic: {seed, init_std}`` and the engine draws the weights.
    ``context_length``: the most tokens, prompt and output together, that the positions allow; None where the config
    leaves it to the model's code (Gemma 3).
    ``architecture``: as in ``config.json``, such as ``Qwen3ForCausalLM``.
    ``weight_bytes``: of the files; of all parameters in ``dtype`` where weights are drawn.
    """

    path: Path
    served_model_name: str
    architecture: str
    context_length: int | None
    dtype: str
    has_weights: bool
    weight_bytes: int

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES.get(self.dtype, 2)


def read_checkpoint(path: Path, served_model_name: str) -> Checkpoint:
    """Reads ``config.json`` of a directory. Raises UsageError where it describes no model that generates text."""
    config = read_config(path)
    text = text_config(config)
    if not all(isinstance(text.get(field), int) for field in ("hidden_size", "num_hidden_layers")):
        raise UsageError(
            f"{path / 'config.json'} has no hidden_size or num_hidden_layers, at its top or in text_config; expected a "
            "text model in Hugging Face form"
        )
    positions = text.get("max_position_embeddings")
    dtype = str(_first(config, text, "dtype", "torch_dtype") or "bfloat16")
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    drawn = parameter_count(config) * _DTYPE_BYTES.get(dtype, 2) if DRAWN_WEIGHTS in config else 0
    return Checkpoint(
        path=path,
        served_model_name=served_model_name,
        architecture=str((config.get("architectures") or [config.get("model_type", "unknown")])[0]),
        context_length=positions if isinstance(positions, int) else None,
        dtype=dtype,
        has_weights=stored > 0,
        weight_bytes=stored or drawn,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: multimodal checkpoints nest it."""
    nested = config.get("text_config") or config.get("llm_config")
    return nested if isinstance(nested, Mapping) else config


def _first(config: Mapping[str, Any], text: Mapping[str, Any], *names: str) -> object:
    return next((of[name] for of in (config, text) for name in names if of.get(name)), None)


def read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'config.json'} cannot be read ({error}); expected a Hugging Face config") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path / 'config.json'} holds a {type(config).__name__}; expected a JSON object")
    return config

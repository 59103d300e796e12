"""``config.json`` of a dense decoder becomes one checked value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.errors import UsageError
from trtx.torch_engine.runner.quantization import Quantization, read_quantization

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. The last four fields hold for ``llama3`` alone, ``factor`` for ``linear`` too."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a dense decoder: Llama 3, Qwen2 or Qwen3."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    dtype: str  # the checkpoint's: "bfloat16"
    synthetic_seed: int | None  # weights are drawn, not read, when the directory holds none
    synthetic_std: float
    quantization: Quantization | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``model_dir/config.json``. Raises UsageError for what this engine does not compute exactly."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(
            f"model directory {model_dir} has no config.json; expected a Hugging Face checkpoint directory"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); expected a Hugging Face config.json") from error
    return _parse(raw, read_quantization(model_dir, raw), source=str(path))


def _parse(raw: dict[str, Any], quantization: Quantization | None, *, source: str) -> ModelConfig:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{source}: architecture {architecture} is not known to the torch engine; "
            f"expected one of {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(raw, source)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        attention_bias = bool(raw.get("attention_bias", False))
        synthetic = raw.get("trtx_synthetic") or {}
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position=int(raw["max_position_embeddings"]),
            rope=_parse_rope(raw, source),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            synthetic_seed=int(synthetic["seed"]) if synthetic else None,
            synthetic_std=float(synthetic.get("init_std", raw.get("initializer_range", 0.02))),
            quantization=quantization,
        )
    except KeyError as error:
        raise UsageError(f"{source} has no {error}; expected a complete config.json of {architecture}") from error


def _refuse_unsupported(raw: dict[str, Any], source: str) -> None:
    refused = {
        "use_sliding_window": raw.get("use_sliding_window"),
        "mlp_bias": raw.get("mlp_bias"),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
    }
    for field, value in refused.items():
        if value:
            raise UsageError(
                f"{source}: {field} is {raw[field]!r}, which the torch engine does not compute; "
                "use another checkpoint or --engine tensorrt-llm"
            )


def _parse_rope(raw: dict[str, Any], source: str) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``; before it, ``rope_theta`` beside ``rope_scaling``."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise UsageError(
            f"{source}: rope type {kind!r} is not supported by the torch engine; expected one of "
            f"{', '.join(_ROPE_TYPES)}"
        )
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", 8192)),
    )

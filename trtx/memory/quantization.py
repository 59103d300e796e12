"""How a checkpoint stores its weights: bytes a parameter, and which modules stay in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trtx.checkpoint.quantization import read_quantization as checkpoint_quantization

# Bytes a parameter, scales included. Layouts: ModelOpt's unified export, DeepSeek-V3's 128 x 128 blocks with a float32
# scale, OCP MX with a byte for 32 values.
_ALGORITHMS = {
    "FP8": 1.0,
    "FP8_PER_CHANNEL_PER_TOKEN": 1.0,
    "FP8_BLOCK_SCALES": 1.0 + 4 / (128 * 128),
    "FP8_PB_WO": 1.0 + 4 / (128 * 128),
    "W8A8_SQ_PER_CHANNEL": 1.0,
    "INT8_SQ": 1.0,
    "W4A16_AWQ": 0.5 + 2 / 128,
    "W4A8_AWQ": 0.5 + 2 / 128,
    "W4A16_GPTQ": 0.5 + 2.5 / 128,
    "NVFP4": 0.5 + 1 / 16,
    "NVFP4_AWQ": 0.5 + 1 / 16,
    "MXFP4": 0.5 + 1 / 32,
    "W4A8_MXFP4_FP8": 0.5 + 1 / 32,
    "W4A8_MXFP4_MXFP8": 0.5 + 1 / 32,
}
# By kind of weight, a module name to match exclusions against.
_MODULES = {
    "heads": "model.layers.0.self_attn.q_proj",
    "kv_heads": "model.layers.0.self_attn.k_proj",
    "latent": "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "mlp": "model.layers.0.mlp.down_proj",
    "experts": "model.layers.0.mlp.experts.0.down_proj",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """``algorithm`` is TensorRT-LLM's QuantAlgo, None for none. ``kv_algorithm``: of the KV cache, where calibrated."""

    algorithm: str | None = None
    kv_algorithm: str | None = None
    excluded: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.algorithm is None or self.algorithm in _ALGORITHMS

    def parameter_bytes(self, kind: str, full: float) -> float:
        """Of weights of ``kind``, a key of shapes.Parameters; ``full`` is the unquantized width."""
        if self.algorithm not in _ALGORITHMS or kind not in _MODULES:
            return full
        if self.algorithm == "MXFP4" and kind != "experts":  # gpt-oss: its experts alone
            return full
        module = _MODULES[kind]
        if any(pattern in module or fnmatch(module, f"{pattern}*") for pattern in self.excluded):
            return full
        return _ALGORITHMS[self.algorithm]


def read_quantization(directory: Path, config: Mapping[str, Any]) -> Quantization:
    """As the checkpoint says it, in either place."""
    found = checkpoint_quantization(directory, config)
    if found is None:
        return Quantization()
    return Quantization(found.algorithm, found.kv_cache_algorithm, found.excluded)

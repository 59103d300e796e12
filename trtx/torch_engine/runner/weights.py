"""Weights of a dense decoder, merged for serving: read from safetensors, quantized or not, or drawn on the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.errors import UsageError
from trtx.torch_engine.runner.formats import Format, Fp8, Part, Stored, format_of, shared_input_scale
from trtx.torch_engine.runner.linear import Linear, PlainLinear
from trtx.torch_engine.runner.tensor_source import tensors_of

log = logging.getLogger(__name__)

_SCALED_MULTIPLE = 16  # torch._scaled_mm takes no other rows and columns


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Head norms are None where the model has none."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden to q_size + 2 * kv_size: rows of q, k, v
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # q_size to hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden to 2 * intermediate: rows of gate, up
    down: Linear  # intermediate to hidden


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied
    kv_scales: Tensor  # [num_layers, 2] float32: a KV value in float8 times its layer's (k, v) is what it means


@dataclass(frozen=True, slots=True)
class _Module:
    """One linear module of the checkpoint."""

    name: str
    rows: int
    columns: int
    has_bias: bool = False


def named_tensors(model_dir: Path, *, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its Hugging Face name, one at a time, on ``device`` in ``dtype``; a tied head has none.

    A synthetic checkpoint without stored weights is drawn: the same values wherever this is called for the same kind of
    device and dtype. Raises UsageError for a quantized checkpoint, and a missing, misshapen or unreadable tensor.
    """
    config = read_model_config(model_dir)
    if config.quantization is not None and config.quantization.algorithm is not None:
        raise UsageError(
            f"{model_dir} is quantized already, to {config.quantization.algorithm}; expected the original checkpoint"
        )
    yield from tensors_of(model_dir, config, _expected(config), device=device, dtype=dtype)


def load_weights(
    model_dir: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, scaled_products: bool
) -> DecoderWeights:
    """Every parameter on ``device``: FP8 weights as they are with ``scaled_products``, all others in ``dtype``.

    A quantized weight is dequantized on its own, so no more than one is there twice. Raises UsageError for a missing,
    misshapen or unreadable tensor.
    """
    tensors = dict(tensors_of(model_dir, config, _expected(config), device=device, dtype=dtype))
    loader = _Loader(config, tensors, dtype, scaled_products)
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # parts are too small for the next layer's merged weights: they would pile up
    embedding = tensors.pop("model.embed_tokens.weight")
    head = embedding if config.tied_head else tensors.pop("lm_head.weight")
    if device.type == "cuda" and loader.num_dequantized:
        log.warning(
            "%s weights are dequantized to %s on this GPU: as exact as they were, but no smaller and no faster",
            config.quantization and config.quantization.algorithm,
            dtype,
        )
    return DecoderWeights(embedding, tuple(layers), tensors.pop("model.norm.weight"), head, loader.kv_scales(device))


class _Loader:
    """Takes tensors out of ``tensors`` as it merges them, so that they are freed one layer after the other."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype, scaled: bool) -> None:
        self._config = config
        self._tensors = tensors
        self._dtype = dtype
        self._scaled = scaled
        self._format = _format(config)
        self.num_dequantized = 0

    def layer(self, index: int) -> LayerWeights:
        at, take = f"model.layers.{index}", self._tensors.pop
        modules = _modules(self._config, index)
        return LayerWeights(
            input_norm=take(f"{at}.input_layernorm.weight"),
            qkv=self._linear(modules["qkv"]),
            q_norm=take(f"{at}.self_attn.q_norm.weight", None),
            k_norm=take(f"{at}.self_attn.k_norm.weight", None),
            output=self._linear(modules["output"]),
            mlp_norm=take(f"{at}.post_attention_layernorm.weight"),
            gate_up=self._linear(modules["gate_up"]),
            down=self._linear(modules["down"]),
        )

    def kv_scales(self, device: torch.device) -> Tensor:
        one = torch.ones((), device=device)
        pairs = [
            torch.stack([self._tensors.pop(name, one) for name in _kv_scale_names(index)])
            for index in range(self._config.num_layers)
        ]
        return torch.stack(pairs)

    def _linear(self, modules: list[_Module]) -> Linear:
        names, take = [module.name for module in modules], self._tensors.pop
        bias = _merged([take(f"{name}.bias") for name in names]) if modules[0].has_bias else None
        if not _is_quantized(self._config, modules):
            return PlainLinear(_merged([take(f"{name}.weight") for name in names]), bias)
        assert self._format is not None
        suffixes = self._format.stored(1, 1)
        parts: list[Part] = [
            {suffix: take(f"{name}.{suffix}") for suffix in suffixes if f"{name}.{suffix}" in self._tensors}
            for name in names
        ]
        sizes = (modules[0].columns, sum(module.rows for module in modules))
        if self._scaled and isinstance(self._format, Fp8) and not any(size % _SCALED_MULTIPLE for size in sizes):
            from trtx.torch_engine.runner.scaled_linear import ScaledLinear

            return ScaledLinear(
                weight=_merged([part["weight"] for part in parts]),
                row_scales=torch.cat([part["weight_scale"].expand(part["weight"].shape[0]) for part in parts]),
                input_scale=shared_input_scale(parts),
                bias=bias,
                dtype=self._dtype,
            )
        self.num_dequantized += 1
        try:
            prepare = self._format.prepare(parts)
        except ValueError as error:
            raise UsageError(f"{', '.join(names)}: {error}; export the checkpoint with ModelOpt again") from error
        return PlainLinear(_merged([self._format.dequantize(part).to(self._dtype) for part in parts]), bias, prepare)


def _expected(config: ModelConfig) -> dict[str, Stored]:
    """Every tensor of the checkpoint by name, in the order in which weights are drawn."""
    found: dict[str, Stored] = {}
    hidden, norm_size = config.hidden_size, config.head_dim
    quantized = _format(config)
    has_kv_scales = config.quantization is not None and config.quantization.kv_cache_algorithm is not None
    for index in range(config.num_layers):
        at, modules = f"model.layers.{index}", _modules(config, index)
        found[f"{at}.input_layernorm.weight"] = Stored((hidden,))
        found[f"{at}.post_attention_layernorm.weight"] = Stored((hidden,))
        if config.qk_norm:
            found[f"{at}.self_attn.q_norm.weight"] = found[f"{at}.self_attn.k_norm.weight"] = Stored((norm_size,))
        for group in modules.values():
            is_quantized = _is_quantized(config, group)
            for module in group:
                plain = {"weight": Stored((module.rows, module.columns))}
                stored = quantized.stored(module.rows, module.columns) if is_quantized and quantized else plain
                found |= {f"{module.name}.{suffix}": tensor for suffix, tensor in stored.items()}
            found |= {f"{module.name}.bias": Stored((module.rows,)) for module in group if module.has_bias}
        if has_kv_scales:
            found |= {name: Stored((), torch.float32, is_optional=True) for name in _kv_scale_names(index)}
    found["model.embed_tokens.weight"] = Stored((config.vocab_size, hidden))
    found["model.norm.weight"] = Stored((hidden,))
    if not config.tied_head:
        found["lm_head.weight"] = Stored((config.vocab_size, hidden))
    return found


def _format(config: ModelConfig) -> Format | None:
    quantization = config.quantization
    return format_of(quantization) if quantization is not None and quantization.algorithm is not None else None


def _modules(config: ModelConfig, index: int) -> dict[str, list[_Module]]:
    """The linear modules of a layer, those together that are computed as one product."""
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    hidden, inner, biased = config.hidden_size, config.intermediate_size, config.qkv_bias
    return {
        "qkv": [
            _Module(f"{attention}.q_proj", config.q_size, hidden, biased),
            _Module(f"{attention}.k_proj", config.kv_size, hidden, biased),
            _Module(f"{attention}.v_proj", config.kv_size, hidden, biased),
        ],
        "output": [_Module(f"{attention}.o_proj", hidden, config.q_size, config.output_bias)],
        "gate_up": [_Module(f"{mlp}.gate_proj", inner, hidden), _Module(f"{mlp}.up_proj", inner, hidden)],
        "down": [_Module(f"{mlp}.down_proj", hidden, inner)],
    }


def _is_quantized(config: ModelConfig, modules: list[_Module]) -> bool:
    if config.quantization is None:
        return False
    covered = [module.name for module in modules if config.quantization.covers(module.name)]
    if covered and len(covered) < len(modules):
        others = [module.name for module in modules if module.name not in covered]
        raise UsageError(
            f"{config.quantization.source} quantizes {covered[0]} and excludes {others[0]}, one product here; "
            "expected both or neither; serve it with the engine tensorrt-llm"
        )
    return bool(covered)


def _kv_scale_names(index: int) -> tuple[str, str]:
    attention = f"model.layers.{index}.self_attn"
    return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def _merged(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

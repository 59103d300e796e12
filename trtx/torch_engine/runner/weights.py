"""Weights of a dense decoder, merged for serving: read from safetensors, or drawn on the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtx.errors import UsageError
from trtx.torch_engine.runner.model_config import ModelConfig, read_model_config


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Products are ``x @ weight.T``; biases and head norms are None where the model has none."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 * kv_size, hidden]: rows of q, k, v
    qkv_bias: Tensor | None  # [q_size + 2 * kv_size]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, q_size]
    output_bias: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: rows of gate, up
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied


def named_tensors(model_dir: Path, *, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its Hugging Face name, one at a time, on ``device`` in ``dtype``; a tied head has none.

    A synthetic checkpoint without stored weights is drawn: the same values wherever this is called for the same kind of
    device and dtype. Raises UsageError for a missing, misshapen or unreadable tensor.
    """
    config = read_model_config(model_dir)
    _, expected = _allocate(config, torch.device("meta"), dtype)
    shapes = {name: target.shape for name, target in expected.items()}
    for name, value in _values(model_dir, config, shapes, device, dtype):
        yield name, value.to(device, dtype)


def load_weights(model_dir: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Every parameter on ``device`` in ``dtype``. Raises UsageError for a missing, misshapen or unreadable tensor."""
    weights, targets = _allocate(config, device, dtype)
    shapes = {name: target.shape for name, target in targets.items()}
    for name, value in _values(model_dir, config, shapes, device, dtype):
        targets[name].copy_(value)
    return weights


def _values(
    model_dir: Path, config: ModelConfig, shapes: Mapping[str, torch.Size], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """From files as they are stored, or drawn on ``device`` in ``dtype``."""
    files = _weight_files(model_dir)
    if files:
        return _stored(files, shapes, config, model_dir)
    if config.synthetic_seed is None:
        raise UsageError(
            f"model directory {model_dir} has no safetensors weights; expected model.safetensors or "
            "model.safetensors.index.json: download the checkpoint whole, or use synthetic:<shape>"
        )
    return _drawn(shapes, config, device, dtype)


def _allocate(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Merged tensors, and the checkpoint's names as views into them."""
    targets: dict[str, Tensor] = {}

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def named(name: str, tensor: Tensor) -> Tensor:
        targets[name] = tensor
        return tensor

    def merged(tensor: Tensor, suffix: str, parts: dict[str, int]) -> Tensor:
        for name, view in zip(parts, torch.split(tensor, list(parts.values())), strict=True):
            targets[f"{name}.{suffix}"] = view
        return tensor

    hidden, intermediate, layers = config.hidden_size, config.intermediate_size, []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        rows = {
            f"{attention}.q_proj": config.q_size,
            f"{attention}.k_proj": config.kv_size,
            f"{attention}.v_proj": config.kv_size,
        }
        total = sum(rows.values())
        layers.append(
            LayerWeights(
                input_norm=named(f"{prefix}.input_layernorm.weight", empty(hidden)),
                qkv=merged(empty(total, hidden), "weight", rows),
                qkv_bias=merged(empty(total), "bias", rows) if config.qkv_bias else None,
                q_norm=named(f"{attention}.q_norm.weight", empty(config.head_dim)) if config.qk_norm else None,
                k_norm=named(f"{attention}.k_norm.weight", empty(config.head_dim)) if config.qk_norm else None,
                output=named(f"{attention}.o_proj.weight", empty(hidden, config.q_size)),
                output_bias=named(f"{attention}.o_proj.bias", empty(hidden)) if config.output_bias else None,
                mlp_norm=named(f"{prefix}.post_attention_layernorm.weight", empty(hidden)),
                gate_up=merged(
                    empty(2 * intermediate, hidden),
                    "weight",
                    {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate},
                ),
                down=named(f"{mlp}.down_proj.weight", empty(hidden, intermediate)),
            )
        )
    embedding = named("model.embed_tokens.weight", empty(config.vocab_size, hidden))
    final_norm = named("model.norm.weight", empty(hidden))
    head = embedding if config.tied_head else named("lm_head.weight", empty(config.vocab_size, hidden))
    return DecoderWeights(embedding, tuple(layers), final_norm, head), targets


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{index} is no safetensors index ({error!r}); download the checkpoint again") from error
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise UsageError(f"{index} names {missing[0]}, which is not there; download the checkpoint whole")
        return [model_dir / name for name in names]
    return sorted(model_dir.glob("*.safetensors"))


def _read(files: list[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    yield name, lambda file=file, name=name: file.get_tensor(name)  # type: ignore[misc]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _stored(
    files: list[Path], shapes: Mapping[str, torch.Size], config: ModelConfig, model_dir: Path
) -> Iterator[tuple[str, Tensor]]:
    missing = set(shapes)
    for name, read in _read(files):
        if name not in shapes:
            # A tied checkpoint may repeat its head; old ones carry rotary buffers, which are computed here.
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_head):
                continue
            raise UsageError(
                f"{model_dir} holds the tensor {name}, which {config.architecture} as its config.json describes it "
                "has no place for; expected a dense, unquantized checkpoint"
            )
        value = read()
        if value.shape != shapes[name]:
            raise UsageError(
                f"{model_dir}: tensor {name} has shape {list(value.shape)}, its config.json says {list(shapes[name])}"
            )
        missing.discard(name)
        yield name, value
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors of {config.architecture}, first {min(missing)}; "
            "download the checkpoint whole"
        )


def _drawn(
    shapes: Mapping[str, torch.Size], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The same seed gives the same weights on the same kind of device (torch's CPU and CUDA generators differ)."""
    assert config.synthetic_seed is not None
    generator = torch.Generator(device).manual_seed(config.synthetic_seed)
    for name, shape in shapes.items():
        value = torch.empty(shape, device=device, dtype=dtype)
        if "norm" in name:
            yield name, value.fill_(1.0)
        else:
            yield name, value.normal_(0.0, config.synthetic_std, generator=generator)

"""Quantized exports of tiny models in ModelOpt's layout, written by hand: tests need no ModelOpt for them.

:func:`export` writes one, and returns the model as transformers computes it with every quantized product done the plain
way: unpacked one element at a time, by looking up the nearest value that the format has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

GROUP = 32  # of INT4 AWQ here, 128 in ModelOpt's default: the tiny models are no wider
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.float8_e4m3fn


def export(
    model: PreTrainedModel,
    algorithm: str,
    directory: Path,
    *,
    kv_scales: bool = False,
    excluded: tuple[str, ...] = ("lm_head",),
) -> PreTrainedModel:
    """Scales come from the activations of a fixed prompt. Changes ``model``, and returns it."""
    ways = {"_PACKED": _PACKED, "_WEIGHT": _WEIGHT, "_INPUT": _INPUT}
    lacking = [name for name, way in ways.items() if algorithm not in way]
    assert not lacking, (
        f"{Path(__file__).name} has no plain way of {algorithm}: add it to {', '.join(lacking)} there, packed and "
        "unpacked one element at a time"
    )
    maxima = _input_maxima(model)
    tensors: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name in excluded:
            continue
        stored = _PACKED[algorithm](module.weight.detach(), maxima[name])
        tensors |= {f"{name}.{suffix}": value for suffix, value in stored.items()}
        parent, child = name.rsplit(".", 1)
        setattr(model.get_submodule(parent), child, PlainlyQuantized(algorithm, stored, module.bias))
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.detach().clone()
        if kv_scales and child in ("k_proj", "v_proj"):
            tensors[f"{name}.{child[0]}_scale"] = torch.tensor(0.02 if child == "k_proj" else 0.007)
    for name, module in list(model.named_modules()):
        if name.endswith(".mlp.experts"):
            experts = PlainlyQuantizedExperts(algorithm, module, maxima[name])
            tensors |= {f"{name}.{suffix}": value for suffix, value in experts.stored.items()}
            model.get_submodule(name.rpartition(".")[0]).experts = experts
    quantized = {name.rsplit(".", 1)[0] for name in tensors}
    for name, value in model.state_dict().items():
        if name.rsplit(".", 1)[0] not in quantized and not (name == "lm_head.weight" and _is_tied(model)):
            tensors[name] = value.clone()
    directory.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if kv_scales else None,
        "group_size": {"W4A16_AWQ": GROUP, "NVFP4": 16}.get(algorithm),
        "exclude_modules": list(excluded),
    }
    text = json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization})
    (directory / "hf_quant_config.json").write_text(text)
    return model


class PlainlyQuantized(nn.Module):
    def __init__(self, algorithm: str, stored: dict[str, Tensor], bias: Tensor | None) -> None:
        super().__init__()
        self.algorithm, self.stored, self.bias = algorithm, stored, bias
        self.dequantized = _WEIGHT[algorithm](stored)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(_INPUT[self.algorithm](x, self.stored), self.dequantized, self.bias)


class PlainlyQuantizedExperts(nn.Module):
    """The experts of a layer, one token and one expert after the other. All have the same scales of their inputs."""

    def __init__(self, algorithm: str, experts: nn.Module, maxima: Tensor) -> None:
        super().__init__()
        self.stored: dict[str, Tensor] = {}
        self.products: list[dict[str, PlainlyQuantized]] = []
        gated_maxima = maxima.max() * 2
        for index, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            weights = dict(zip(("gate", "up", "down"), (*gate_up.detach().chunk(2), down.detach()), strict=True))
            own = {
                kind: _PACKED[algorithm](weight, gated_maxima if kind == "down" else maxima)
                for kind, weight in weights.items()
            }
            self.products.append({kind: PlainlyQuantized(algorithm, one, None) for kind, one in own.items()})
            self.stored |= {
                f"{index}.{kind}_proj.{suffix}": value for kind, one in own.items() for suffix, value in one.items()
            }

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for row, (experts, weights) in enumerate(zip(chosen.tolist(), shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                of, x = self.products[expert], hidden[row]
                out[row] += weight * of["down"](nn.functional.silu(of["gate"](x)) * of["up"](x))
        return out


def _is_tied(model: PreTrainedModel) -> bool:
    return bool(model.config.tie_word_embeddings)


def _input_maxima(model: PreTrainedModel) -> dict[str, Tensor]:
    """The largest magnitude of each input column of each linear module."""
    maxima: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            maxima[name] = inputs[0].detach().abs().flatten(0, -2).amax(0)

        return hook

    linear = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or name.endswith(".mlp.experts")
    ]
    hooks = [module.register_forward_hook(look(name)) for name, module in linear]
    with torch.no_grad():
        model((torch.arange(64)[None] * 37) % model.config.vocab_size)
    for hook in hooks:
        hook.remove()
    return maxima


# --- packing: weight [rows, columns] and the input columns' maxima to stored tensors ---


def _pack_fp8(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": maxima.max() / 448}


def _pack_int4(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    smoothing = 1 / (0.5 + maxima / maxima.mean())
    weight = weight / smoothing
    scale = weight.view(weight.shape[0], -1, GROUP).abs().amax(-1) / 7
    values = (weight / scale.repeat_interleave(GROUP, 1)).round().clamp(-8, 7).to(torch.int8)
    packed = torch.empty(weight.shape[0] // 2, weight.shape[1], dtype=torch.uint8)
    for row in range(packed.shape[0]):
        low, high = values[2 * row].int() % 16, values[2 * row + 1].int() % 16
        packed[row] = (low + 16 * high).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "pre_quant_scale": smoothing}


def _pack_nvfp4(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    double = weight.abs().max() / (6 * 448)
    blocks = weight.view(weight.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / (6 * double)).clamp(2**-9, 448).to(FP8)
    codes = _nearest(blocks.abs() / (scale.float() * double)[..., None]) + 8 * (blocks < 0)
    codes = codes.view(weight.shape).to(torch.uint8)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    return {
        "weight": packed, "weight_scale": scale, "weight_scale_2": double, "input_scale": maxima.max() / (6 * 448),
    }  # fmt: skip


def _pack_int8(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    smoothing = 1 / (0.5 + maxima / maxima.mean())
    weight = weight / smoothing
    scale = weight.abs().amax(1) / 127
    return {
        "weight": (weight / scale[:, None]).round().to(torch.int8), "weight_scale": scale,
        "input_scale": (maxima * smoothing).max() / 127, "pre_quant_scale": smoothing,
    }  # fmt: skip


_PACKED: dict[str, Any] = {
    "FP8": _pack_fp8, "W4A16_AWQ": _pack_int4, "NVFP4": _pack_nvfp4, "W8A8_SQ_PER_CHANNEL": _pack_int8,
}  # fmt: skip

# --- the plain way back ---


def _nearest(magnitudes: Tensor) -> Tensor:
    return (magnitudes[..., None] - E2M1).abs().argmin(-1)


def _int4_weight(stored: dict[str, Tensor]) -> Tensor:
    packed, scale = stored["weight"].int(), stored["weight_scale"]
    rows = []
    for row in range(2 * packed.shape[0]):
        nibble = (packed[row // 2] >> 4) if row % 2 else packed[row // 2] % 16
        signed = torch.tensor([value - 16 if value >= 8 else value for value in nibble.tolist()]).float()
        rows.append(signed * torch.cat([one.expand(GROUP) for one in scale[row]]))
    return torch.stack(rows)


def _nvfp4_weight(stored: dict[str, Tensor]) -> Tensor:
    packed = stored["weight"].int()
    weight = torch.empty(packed.shape[0], 2 * packed.shape[1])
    for column in range(weight.shape[1]):
        code = (packed[:, column // 2] >> 4) if column % 2 else packed[:, column // 2] % 16
        value = E2M1[code % 8] * torch.where(code >= 8, -1.0, 1.0)
        weight[:, column] = value * stored["weight_scale"][:, column // 16].float() * stored["weight_scale_2"]
    return weight


_WEIGHT: dict[str, Any] = {
    "FP8": lambda stored: stored["weight"].float() * stored["weight_scale"],
    "W4A16_AWQ": _int4_weight,
    "NVFP4": _nvfp4_weight,
    "W8A8_SQ_PER_CHANNEL": lambda stored: stored["weight"].float() * stored["weight_scale"][:, None],
}


def _fp8_input(x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    scale = stored["input_scale"]
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


def _nvfp4_input(x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    blocks, double = x.view(*x.shape[:-1], -1, 16), stored["input_scale"]
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * double)).clamp(max=448).to(FP8).float() * double
    return (E2M1[_nearest(blocks.abs() / scale)] * blocks.sign() * scale).view(x.shape)


def _int8_input(x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    scale = stored["input_scale"]
    return (x * stored["pre_quant_scale"] / scale).round().clamp(-128, 127) * scale


_INPUT: dict[str, Any] = {
    "FP8": _fp8_input,
    "W4A16_AWQ": lambda x, stored: x * stored["pre_quant_scale"],
    "NVFP4": _nvfp4_input,
    "W8A8_SQ_PER_CHANNEL": _int8_input,
}

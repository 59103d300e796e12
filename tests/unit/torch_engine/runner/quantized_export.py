"""Quantized checkpoints of tiny models, written by hand: in ModelOpt's layout, or in that of another exporter.

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
BLOCK = 128  # rows, and columns, of a block of FP8


def export(
    model: PreTrainedModel,
    algorithm: str,
    directory: Path,
    *,
    exporter: str = "modelopt",
    kv_scales: bool = False,
    excluded: tuple[str, ...] = ("lm_head",),
    ranks: int = 1,
) -> PreTrainedModel:
    """Scales come from the activations of a fixed prompt. Changes ``model``, and returns it.

    ``exporter``: "modelopt", "fp8" (as Qwen publishes block scales) or "compressed-tensors" (as Red Hat publishes FP8);
    the last two store scales in bfloat16. ``ranks``: dynamic scales of the inputs that so many ranks split are those of
    each rank's share.
    """
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
        stored = _packed(algorithm, module.weight.detach(), maxima[name], exporter)
        tensors |= {f"{name}.{suffix}": value for suffix, value in _as_stored(algorithm, stored, exporter).items()}
        parent, child = name.rsplit(".", 1)
        shares = ranks if child in ("o_proj", "down_proj") else 1
        setattr(model.get_submodule(parent), child, PlainlyQuantized(algorithm, stored, module.bias, shares))
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.detach().clone()
        if kv_scales and child in ("k_proj", "v_proj"):
            tensors[f"{name}.{child[0]}_scale"] = torch.tensor(0.02 if child == "k_proj" else 0.007)
    for name, module in list(model.named_modules()):
        if name.endswith(".mlp.experts"):
            experts = PlainlyQuantizedExperts(algorithm, module, maxima[name], exporter)
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
    if exporter == "modelopt":
        quantization = {
            "quant_algo": "fp8_pb_wo" if algorithm == "FP8_PB_WO" else algorithm,  # so ModelOpt 0.47 writes it
            "kv_cache_quant_algo": "FP8" if kv_scales else None,
            "group_size": {"W4A16_AWQ": GROUP, "NVFP4": 16}.get(algorithm),
            "exclude_modules": list(excluded),
        }
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization})
        (directory / "hf_quant_config.json").write_text(text)
    else:
        stated = fp8_config(excluded) if exporter == "fp8" else compressed_config(algorithm, excluded)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    return model


def fp8_config(excluded: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """The ``quantization_config`` of Qwen3-8B-FP8, which lists norms and routers too."""
    others = ("model.layers.0.input_layernorm", "model.layers.1.mlp.gate")
    return {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*excluded, *others],
    }  # fmt: skip


def compressed_config(algorithm: str, excluded: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """The ``quantization_config`` of Red Hat's FP8 (static), FP8-dynamic and FP8-block checkpoints."""
    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "block_structure": None}
    weights, inputs = {
        "FP8": ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
        "FP8_PER_CHANNEL_PER_TOKEN": ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
        "FP8_BLOCK_SCALES": (
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
    }[algorithm]
    group = {
        "weights": number | {"group_size": None, "dynamic": False, "observer": "minmax", "actorder": None} | weights,
        "input_activations": number | {"group_size": None, "observer": None, "observer_kwargs": {}} | inputs,
        "output_activations": None, "targets": ["Linear"],
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": "float-quantized", "global_compression_ratio": 1.5,
        "ignore": list(excluded), "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {},
    }  # fmt: skip


class PlainlyQuantized(nn.Module):
    def __init__(self, algorithm: str, stored: dict[str, Tensor], bias: Tensor | None, shares: int = 1) -> None:
        super().__init__()
        self.algorithm, self.stored, self.bias, self.shares = algorithm, stored, bias, shares
        self.dequantized = _WEIGHT[algorithm](stored)

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.cat([_INPUT[self.algorithm](share, self.stored) for share in x.chunk(self.shares, -1)], -1)
        return nn.functional.linear(rounded, self.dequantized, self.bias)


class PlainlyQuantizedExperts(nn.Module):
    """The experts of a layer, one token and one expert after the other. All have the same scales of their inputs."""

    def __init__(self, algorithm: str, experts: nn.Module, maxima: Tensor, exporter: str) -> None:
        super().__init__()
        self.stored: dict[str, Tensor] = {}
        self.products: list[dict[str, PlainlyQuantized]] = []
        gated_maxima = maxima.max() * 2
        for index, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            weights = dict(zip(("gate", "up", "down"), (*gate_up.detach().chunk(2), down.detach()), strict=True))
            own = {
                kind: _packed(algorithm, weight, gated_maxima if kind == "down" else maxima, exporter)
                for kind, weight in weights.items()
            }
            self.products.append({kind: PlainlyQuantized(algorithm, one, None) for kind, one in own.items()})
            self.stored |= {
                f"{index}.{kind}_proj.{suffix}": value
                for kind, one in own.items()
                for suffix, value in _as_stored(algorithm, one, exporter).items()
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


def _packed(algorithm: str, weight: Tensor, maxima: Tensor, exporter: str) -> dict[str, Tensor]:
    """In the layout of trtx/checkpoint/formats.py. Scales of other exporters have the values that bfloat16 has."""
    found: dict[str, Tensor] = _PACKED[algorithm](weight, maxima)
    if exporter == "modelopt":
        return found
    return {name: value if name == "weight" else value.bfloat16().float() for name, value in found.items()}


def _as_stored(algorithm: str, packed: dict[str, Tensor], exporter: str) -> dict[str, Tensor]:
    if exporter == "modelopt":
        return packed
    found = {name: value if name == "weight" else value.bfloat16() for name, value in packed.items()}
    if exporter == "compressed-tensors":
        if algorithm == "FP8":
            found |= {name: value.view(1) for name, value in found.items() if name != "weight"}
        elif algorithm == "FP8_BLOCK_SCALES":
            found["weight_scale"] = found.pop("weight_scale_inv")
        else:
            found["weight_scale"] = found["weight_scale"][:, None]
    return found


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


def _pack_fp8_rows(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1) / 448
    return {"weight": (weight / scale[:, None]).to(FP8), "weight_scale": scale}


def _pack_fp8_blocks(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    packed, scale = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scale[row, column] = weight[at].abs().max() / 448
            packed[at] = (weight[at] / scale[row, column]).to(FP8)
    return {"weight": packed, "weight_scale_inv": scale}


def _pack_fp8_weight_blocks(weight: Tensor, maxima: Tensor) -> dict[str, Tensor]:
    packed = _pack_fp8_blocks(weight, maxima)
    return {"weight": packed["weight"], "weight_scale": packed["weight_scale_inv"][:, None, :, None]}


_PACKED: dict[str, Any] = {
    "FP8": _pack_fp8, "W4A16_AWQ": _pack_int4, "NVFP4": _pack_nvfp4, "W8A8_SQ_PER_CHANNEL": _pack_int8,
    "FP8_PER_CHANNEL_PER_TOKEN": _pack_fp8_rows, "FP8_BLOCK_SCALES": _pack_fp8_blocks,
    "FP8_PB_WO": _pack_fp8_weight_blocks,
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


def _blocks_weight(stored: dict[str, Tensor]) -> Tensor:
    weight, scale = stored["weight"].float(), stored.get("weight_scale_inv", stored.get("weight_scale"))
    assert scale is not None
    of_rows = torch.tensor([row // BLOCK for row in range(weight.shape[0])])
    for column in range(weight.shape[1]):
        weight[:, column] *= scale.view(scale.shape[0], -1)[of_rows, column // BLOCK]
    return weight


_WEIGHT: dict[str, Any] = {
    "FP8": lambda stored: stored["weight"].float() * stored["weight_scale"],
    "W4A16_AWQ": _int4_weight,
    "NVFP4": _nvfp4_weight,
    "W8A8_SQ_PER_CHANNEL": lambda stored: stored["weight"].float() * stored["weight_scale"][:, None],
    "FP8_PER_CHANNEL_PER_TOKEN": lambda stored: stored["weight"].float() * stored["weight_scale"][:, None],
    "FP8_BLOCK_SCALES": _blocks_weight,
    "FP8_PB_WO": _blocks_weight,
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


def _fp8_row_input(x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    rows = [(row / row.abs().max() * 448).to(FP8).float() * (row.abs().max() / 448) for row in x.view(-1, x.shape[-1])]
    return torch.stack(rows).view(x.shape)


def _fp8_group_input(x: Tensor, stored: dict[str, Tensor]) -> Tensor:
    return torch.cat([_fp8_row_input(group.contiguous(), stored) for group in x.split(BLOCK, -1)], -1)


_INPUT: dict[str, Any] = {
    "FP8": _fp8_input,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_row_input,
    "FP8_BLOCK_SCALES": _fp8_group_input,
    "FP8_PB_WO": lambda x, stored: x,
    "W4A16_AWQ": lambda x, stored: x * stored["pre_quant_scale"],
    "NVFP4": _nvfp4_input,
    "W8A8_SQ_PER_CHANNEL": _int8_input,
}

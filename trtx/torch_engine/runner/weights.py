"""A decoder's weights, merged for serving: read from safetensors, quantized or not, or drawn on the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtx.checkpoint.dense import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Product,
    checkpoint_tensors,
    expert_products,
    kv_scale_names,
    layer_products,
    sinks_name,
)
from trtx.checkpoint.experts import MXFP4, ExpertConfig, router_name, stack_name, stack_place
from trtx.checkpoint.formats import BLOCK_SCALES, TENSOR_SCALES
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.quantized_tensors import check_quantized_tensors
from trtx.errors import UsageError
from trtx.torch_engine.runner.expert_load import ExpertLoad
from trtx.torch_engine.runner.formats import (
    Part,
    Prepare,
    QuantizedFormat,
    block_scales,
    format_of,
    shared_input_scale,
)
from trtx.torch_engine.runner.invariant_multiplier import InvariantMultiplier
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER, Linear, Multiplier, PlainLinear
from trtx.torch_engine.runner.mlp import (
    DenseMlp,
    ExpertBackend,
    ExpertMlp,
    ExpertScales,
    ExpertWeights,
    LayerMlp,
    LoopedExperts,
)
from trtx.torch_engine.runner.rank_split import RankSplit
from trtx.torch_engine.runner.tensor_source import tensors_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Head norms are None for models without them."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden to q_size + 2 * kv_size: rows of q, k, v
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # q_size to hidden
    mlp_norm: Tensor  # [hidden]
    mlp: LayerMlp
    sinks: Tensor | None = None  # [heads]; None for models without attention sinks
    # [hidden]: norms of what attention and MLP give, before it is added to the residual; None for models without them
    output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab, hidden], not scaled
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself if tied; of a rank: its rows
    kv_scales: Tensor  # [num_layers, 2] float32: dequantization scales of a layer's (k, v) in a float8 pool


def named_tensors(model_dir: Path, *, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters with their Hugging Face names, one at a time, on ``device`` in ``dtype``; no tied head.

    For a synthetic checkpoint without stored weights, the values are drawn; they are the same in every call for the
    same device type and dtype. Raises UsageError for a quantized checkpoint, and for a missing, misshapen or unreadable
    tensor.
    """
    config = read_model_config(model_dir)
    if config.quantization is not None and config.quantization.algorithm is not None:
        raise UsageError(
            f"{model_dir} is quantized already, to {config.quantization.algorithm}; expected the original checkpoint"
        )
    yield from tensors_of(model_dir, config, checkpoint_tensors(config), device=device, dtype=dtype)


def load_weights(
    model_dir: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, scaled_products: frozenset[str],
    multiplier: Multiplier = LIBRARY_MULTIPLIER, experts: ExpertBackend | None = None, split: RankSplit | None = None,
    copied_to: torch.device | None = None, load: ExpertLoad | None = None,
) -> DecoderWeights:  # fmt: skip
    """Loads every parameter to ``device``: FP8 weights as stored if ``scaled_products`` take them, others in ``dtype``.

    ``multiplier``: GEMM backend of the weights in ``dtype``. ``experts``: None loops over experts with ``multiplier``.
    ``split``: ``config`` is one rank's share of the model; only that share stays on the device. Quantized weights are
    dequantized one by one, so that at most one is in memory twice; each expert's weight is copied to its place when it
    is read. ``copied_to``: the device that will get a copy of the weights. No backend computes with the weights on
    ``device`` then. On the device ``meta``, the weights have their forms, but no values. ``load``: counts the tokens of
    experts. Raises UsageError for a missing, misshapen or unreadable tensor.
    """
    whole = split.whole if split is not None else config
    check_quantized_tensors(model_dir, whole)
    found = tensors_of(model_dir, whole, checkpoint_tensors(whole), device=device, dtype=dtype, drawn_on=copied_to)
    if split is not None:
        found = split.share(found)
    tensors = dict(found) if config.experts is None else _stacked(found, config, config.experts)
    experts = experts or LoopedExperts(multiplier)
    if split is not None:
        experts = split.summed_experts(experts)
    loader = _Loader(config, tensors, dtype, scaled_products, multiplier, experts, split)
    loader.load = load
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # freed parts do not fit the next merged weights: they would pile up
    embedding = tensors.pop(EMBEDDING)
    tied = embedding if split is None else split.head(embedding)
    head = tied if config.tied_head else tensors.pop(HEAD)
    is_mxfp4 = config.experts is not None and config.experts.is_mxfp4
    if device.type == "cuda" and (loader.num_dequantized or is_mxfp4):
        log.warning(
            "%s weights that no matmul takes as stored are dequantized to %s on this GPU: as exact as before, but no "
            "smaller and no faster",
            MXFP4 if is_mxfp4 else config.quantization and config.quantization.algorithm,
            dtype,
        )
    weights = DecoderWeights(embedding, tuple(layers), loader.norm(FINAL_NORM), head, loader.kv_scales(device))
    if copied_to is None:
        admit_weights(weights, multiplier)
    return weights


def admit_weights(weights: DecoderWeights, multiplier: Multiplier) -> None:
    """Announces all weights to the backends that compute with them, once before their use.

    ``multiplier``: that of the head. Raises UsageError for a weight that a backend can't compute with.
    """
    for layer in weights.layers:
        layer.qkv.admit()
        layer.output.admit()
        layer.mlp.admit()
    multiplier.admit(weights.head)


def _stacked(tensors: Iterator[tuple[str, Tensor]], config: ModelConfig, experts: ExpertConfig) -> dict[str, Tensor]:
    """Collects tensors by name. Those of experts go one by one into a stack of their layer, allocated once."""
    found: dict[str, Tensor] = {}
    for name, value in tensors:
        place = stack_place(experts, config.hidden_size, name, tuple(value.shape))
        if place is None:
            found[name] = value
            continue
        if place.stack not in found:
            found[place.stack] = value.new_empty(place.shape)
        found[place.stack][place.index] = value
    return found


class _Loader:
    """Removes tensors from ``tensors`` as it merges them, so that memory is freed layer by layer."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        scaled: frozenset[str],
        multiplier: Multiplier,
        experts: ExpertBackend,
        split: RankSplit | None,
    ) -> None:
        self._split = split
        self._config = config
        self._tensors = tensors
        self._dtype = dtype
        self._scaled = scaled
        self._multiplier = multiplier
        self._experts = experts
        self.num_dequantized = 0
        self.load: ExpertLoad | None = None

    def layer(self, index: int) -> LayerWeights:
        at, config = f"model.layers.{index}", self._config
        products = layer_products(config, index)
        names = ["post_attention_layernorm"]
        has_output_norms = config.arithmetic.has_output_norms
        if has_output_norms:
            names = ["pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"]
        norms = [self.norm(f"{at}.{name}.weight") for name in names]
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm, k_norm = (self.norm(f"{at}.self_attn.{name}_norm.weight") for name in ("q", "k"))
        if q_norm is not None and config.gemma3 is not None:
            q_norm *= config.gemma3.query_scale
        return LayerWeights(
            input_norm=self.norm(f"{at}.input_layernorm.weight"),
            qkv=self._linear(products["qkv"]),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._summed(products["output"]),
            mlp_norm=norms[0],
            mlp=self._mlp(index, products),
            sinks=self._tensors.pop(sinks_name(index)) if config.has_sinks else None,
            output_norm=norms[1] if has_output_norms else None,
            mlp_output_norm=norms[2] if has_output_norms else None,
        )

    def norm(self, name: str) -> Tensor:
        """Returns a norm's weight: as stored or, if the model adds 1 to it, the sum in float32."""
        weight = self._tensors.pop(name)
        return 1.0 + weight.float() if self._config.arithmetic.norm_adds_one else weight

    def _mlp(self, index: int, products: dict[str, Product]) -> LayerMlp:
        experts = self._config.layer_experts(index)
        if experts is None:
            gate_up, down = self._linear(products["gate_up"]), self._summed(products["down"])
            return DenseMlp(gate_up, down, gates_with_gelu=self._config.arithmetic.gates_with_gelu)
        return ExpertMlp(self._expert_weights(index, experts), self._experts)

    def _expert_weights(self, index: int, experts: ExpertConfig) -> ExpertWeights:
        take, products = self._tensors.pop, expert_products(self._config, index)
        stacks = [stack_name(index, "gate_up"), stack_name(index, "down")]
        router = router_name(experts, index)
        plain = ExpertWeights(
            take(f"{router}.weight"), take(stacks[0]), take(stacks[1]), experts.per_token, experts.normalizes,
            clamp=experts.clamp, first=experts.own.start,
            load=self.load.layer(index) if self.load is not None else None,
        )  # fmt: skip
        if experts.has_bias:
            router_bias, gate_up_bias, down_bias = (take(f"{name}.bias") for name in (router, *stacks))
            plain = replace(plain, router_bias=router_bias, gate_up_bias=gate_up_bias, down_bias=down_bias)
        if products is None or products.loading is None or self._config.quantization is None:
            return plain
        suffixes = [suffix for suffix in products.modules[0].tensors if suffix != "weight"]
        gate_up, down = ({suffix: take(f"{stack}.{suffix}") for suffix in suffixes} for stack in stacks)
        # ModelOpt exports equal scales of the inputs of a layer's experts. TensorRT-LLM takes the maximum too.
        inputs = [stack.pop("input_scale").amax() for stack in (gate_up, down) if "input_scale" in stack]
        if products.is_kept(scaled_products=self._scaled):
            return replace(
                plain,
                scales=ExpertScales(
                    gate_up["weight_scale"] * inputs[0], down["weight_scale"] * inputs[1], inputs[0], inputs[1]
                ),
            )
        form = format_of(self._config.quantization)
        self.num_dequantized += 1
        prepare, prepare_gated = (
            form.prepare([{"input_scale": inputs[place]}] if inputs else []) for place in range(len(stacks))
        )
        halves = plain.gate_up.view(len(experts.own), 2, experts.intermediate_size, -1).flatten(0, 1)
        of_halves = {suffix: scale.flatten(0, 1) for suffix, scale in gate_up.items()}
        return replace(
            plain, gate_up=self._dequantized(form, halves, of_halves).view_as(plain.gate_up),
            down=self._dequantized(form, plain.down, down), prepare=prepare, prepare_gated=prepare_gated,
        )  # fmt: skip

    def _dequantized(self, form: QuantizedFormat, weights: Tensor, scales: Part) -> Tensor:
        """Dequantizes ``weights`` [n, rows, columns] with ``scales`` [n, ...] by suffix, one after the other."""
        found = torch.empty(weights.shape, dtype=self._dtype, device=weights.device)
        for index, (own, weight) in enumerate(zip(found, weights, strict=True)):
            own.copy_(form.dequantize({"weight": weight} | {suffix: scale[index] for suffix, scale in scales.items()}))
        return found

    def kv_scales(self, device: torch.device) -> Tensor:
        found = torch.ones(self._config.num_layers, 2, device=device)
        for index in range(self._config.num_layers):
            for place, name in enumerate(kv_scale_names(index)):
                if name in self._tensors:
                    found[index, place].copy_(self._tensors.pop(name))
        return found

    def _summed(self, product: Product) -> Linear:
        """Returns a matmul whose input the ranks have split."""
        linear = self._linear(product)
        return linear if self._split is None else self._split.summed(linear)

    def _linear(self, product: Product) -> Linear:
        names, take = [module.name for module in product.modules], self._tensors.pop
        bias = _merged([take(f"{name}.bias") for name in names]) if product.has_bias else None
        if product.loading is None or self._config.quantization is None:
            return self._plain(_merged([take(f"{name}.weight") for name in names]), bias)
        parts: list[Part] = [
            {
                suffix: take(f"{module.name}.{suffix}")
                for suffix in module.tensors
                if f"{module.name}.{suffix}" in self._tensors
            }
            for module in product.modules
        ]
        if product.is_kept(scaled_products=self._scaled):
            return self._scaled_linear(str(product.loading.product), parts, bias)
        form = format_of(self._config.quantization)
        self.num_dequantized += 1
        try:
            prepare = form.prepare(parts)
        except ValueError as error:
            raise UsageError(f"{', '.join(names)}: {error}; export the checkpoint with ModelOpt again") from error
        return self._plain(_merged([form.dequantize(part).to(self._dtype) for part in parts]), bias, prepare)

    def _scaled_linear(self, product: str, parts: list[Part], bias: Tensor | None) -> Linear:
        """Returns a matmul of the kind ``product`` with the merged weights of ``parts``."""
        arguments: dict[str, Any] = {
            "weight": _merged([part["weight"] for part in parts]), "bias": bias, "dtype": self._dtype,
        }  # fmt: skip
        if product == BLOCK_SCALES:
            arguments["block_scales"] = torch.cat([block_scales(part) for part in parts])
        else:
            scales = [part["weight_scale"].expand(part["weight"].shape[0]) for part in parts]
            arguments["row_scales"] = torch.cat(scales)
        if product == TENSOR_SCALES:
            arguments["input_scale"] = shared_input_scale(parts)
        if isinstance(self._multiplier, InvariantMultiplier):
            from trtx.torch_engine.runner.triton_multiplier import INVARIANT_LINEARS

            return INVARIANT_LINEARS[product](**arguments)
        from trtx.torch_engine.runner.scaled_linear import SCALED_LINEARS

        return SCALED_LINEARS[product](**arguments)

    def _plain(self, weight: Tensor, bias: Tensor | None, prepare: Prepare | None = None) -> PlainLinear:
        return PlainLinear(weight, bias, prepare, self._multiplier)


def _merged(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:  # there, torch.cat and torch.stack import torch's compiler: 75 MB, a second (torch 2.11)
        return parts[0].new_empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return torch.cat(parts)

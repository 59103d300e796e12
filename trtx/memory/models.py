"""Computes how much memory a checkpoint takes in a given engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path

from trtx.checkpoint.dense import expert_products, layer_products
from trtx.checkpoint.drafts import find_draft
from trtx.checkpoint.experts import MXFP4
from trtx.checkpoint.facts import dtype_of, read_config
from trtx.checkpoint.formats import DTYPE_BYTES, KV_BYTES, products_of
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.quantization import read_quantization
from trtx.checkpoint.tensor_parallel import RankSizes, check_ranks, rank_config
from trtx.memory import reserves, torch_engine
from trtx.memory.budget import Model
from trtx.memory.draft_models import draft_memory
from trtx.memory.encoder import MediaMemory, arena_bytes
from trtx.memory.gpus import MemoryDevice, capability_of
from trtx.memory.limits import Limits
from trtx.memory.rank_shares import Weights
from trtx.memory.shapes import ModelShape, model_shape
from trtx.memory.weights import full_width, model_weights, width_text


def read_model(directory: Path, limits: Limits, device: MemoryDevice, media: MediaMemory | None = None) -> Model:
    """Reads a checkpoint as the engine in ``limits`` would load it.

    ``media``: None counts only the weights of a vision tower. Raises UsageError for a checkpoint that the engine
    refuses, and UnknownShapeError for a model that this arithmetic does not cover.
    """
    config = read_config(directory)
    shape = model_shape(config, dtype=dtype_of(directory, config))
    if limits.engine == "torch":
        return _for_torch(directory, shape, limits, device, media)
    quantization = read_quantization(directory, config)
    width = full_width(shape, limits)
    calibrated = quantization.kv_cache_algorithm if quantization is not None else None
    stated = calibrated if limits.kv_dtype == "auto" else limits.kv_dtype
    return Model(
        shape,
        model_weights(directory, shape, quantization, limits),
        KV_BYTES.get(str(stated).lower(), DTYPE_BYTES.get(str(stated), width)),
        lambda asked: reserves.activation_bytes(shape, asked, int(width)),
        shared_bytes=media.shared_bytes if media is not None else 0,
    )


def _for_torch(
    directory: Path, shape: ModelShape, limits: Limits, device: MemoryDevice, media: MediaMemory | None
) -> Model:
    has_tower = media is None or media.has_encoder
    whole = read_model_config(directory)
    sizes = RankSizes.of(limits.tp, limits.moe_tp, limits.moe_ep)
    check_ranks(whole, sizes)
    config = rank_config(whole, sizes)
    shape = replace(shape, context_length=config.max_position)
    capability = (device.capability or capability_of(device.name)) if device.is_gpu else None
    dtype = torch_engine.compute_dtype(limits.dtype, config.dtype, is_gpu=device.is_gpu)
    scaled = products_of(capability, dtype)
    stored = torch_engine.stored_names(directory, config.architecture)
    layers = (
        torch_engine.layer_bytes(config, layer, dtype=dtype, scaled_products=scaled, stored=stored)
        for layer in range(config.num_layers)
    )
    is_kept = any(product.is_kept(scaled_products=scaled) for product in layer_products(config, 0).values())
    experts = [expert_products(config, layer) for layer in range(config.num_layers)]
    has_wide_experts = any(one and one.loading and not one.is_kept(scaled_products=scaled) for one in experts)
    vocabulary, width = torch_engine.vocabulary_bytes(config, dtype), DTYPE_BYTES[dtype]
    weights = Weights(
        # Of one rank already. A draft model runs on one GPU.
        layers=(*(Counter({"whole": count}) for count in layers), *_draft_layers(config, limits, dtype)),
        embedding=vocabulary,
        # A rank has this share of its rows, filled up so that all ranks have as many.
        head=0 if config.tied_head else -(-config.vocab_size // limits.tp) * limits.tp * config.hidden_size * width,
        vision=torch_engine.tower_bytes(read_config(directory), dtype) if has_tower else 0,
        norm=config.hidden_size * DTYPE_BYTES[torch_engine.norm_dtype(config, dtype)],
        source=f"counted, {_held_as(config, width_text(width), is_kept=is_kept, has_wide_experts=has_wide_experts)}",
    )
    return Model(
        shape,
        weights,
        float(DTYPE_BYTES[torch_engine.kv_dtype(limits.kv_dtype, config.quantization, dtype, capability)]),
        lambda asked: torch_engine.activation_bytes(
            config,
            max_num_tokens=asked.max_num_tokens,
            max_batch_size=asked.max_batch_size,
            dtype=dtype,
            scaled_products=scaled,
            max_draft_len=asked.draft_tokens,
        ),
        kv_padding=torch_engine.padding_layers(config.windows) if config.windows else 0,
        encoder_bytes=reserves.process_bytes(device) + arena_bytes(device) if media and media.has_encoder else 0,
        shared_bytes=media.shared_bytes if media is not None else 0,
    )


def _held_as(config: ModelConfig, width: str, *, is_kept: bool, has_wide_experts: bool) -> str:
    """Returns in words what the weights are on the device.

    ``is_kept``: quantized ones stay as they are stored. ``has_wide_experts``: those of experts don't.
    """
    stored = config.quantization.algorithm if config.quantization is not None else None
    if config.experts is not None and config.experts.is_mxfp4:
        stored = MXFP4
    if stored is None:
        return width
    if not is_kept:
        return f"{stored} dequantized to {width}"
    return f"{stored} with experts dequantized to {width}" if has_wide_experts else stored


def _draft_layers(target: ModelConfig, limits: Limits, dtype: str) -> list[Counter[str]]:
    """Returns a draft model's memory as additional layers of the target model, with the same KV in total."""
    if limits.draft_model is None or limits.speculation is None:
        return []
    draft = draft_memory(
        find_draft(limits.draft_model, limits.speculation), limits.speculation, target,
        layers=list(limits.draft_layers) or None, dtype=dtype, max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
    )  # fmt: skip
    count = max(1, ceil(draft.token_bytes / (2 * target.kv_size * DTYPE_BYTES[dtype])))
    return [Counter({"whole": ceil(draft.fixed_bytes / count)}) for _ in range(count)]

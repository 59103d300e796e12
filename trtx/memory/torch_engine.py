"""What the torch engine takes of its device: the formulas that the plan and the runner both call. No torch.

The runner loads weights, and asks its device what is free then; what it may make of that is computed here alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtx.checkpoint.dense import Product, layer_norms, layer_products
from trtx.checkpoint.formats import DTYPE_BYTES, DTYPES, FP8_CAPABILITY, FP8_DTYPE
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.quantization import Quantization
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import stored_tensors
from trtx.config.torch_groups import block_layers
from trtx.config.torch_limits import LIMITS
from trtx.config.torch_passes import padded_tokens
from trtx.errors import UsageError
from trtx.memory.processor import cpu_dtype

RESERVE_BYTES = 1 << 30
"""Of a GPU: cuBLAS workspaces, CUDA graphs, the allocator's fragments."""
_CPU_TOKENS = 65536  # room for 16 sequences of 4,096 tokens
_CPU_BYTES = 1 << 30
_KV_SCALE_BYTES = 2 * 4  # a layer's, of keys and of values, in float32


def compute_dtype(asked: str, own: str, *, is_gpu: bool) -> str:
    """In which the engine computes: ``asked``, or for "auto" the checkpoint's ``own`` on a GPU, and on a CPU what
    :func:`trtx.memory.processor.cpu_dtype` says."""
    return _dtype(asked, field="dtype", auto=own if is_gpu else cpu_dtype(own))


def kv_dtype(asked: str, quantization: Quantization | None, computed: str, capability: tuple[int, int] | None) -> str:
    """Of the KV cache. As TensorRT-LLM: "auto" follows the checkpoint's ``kv_cache_quant_algo``, else ``computed``.

    ``capability``: None on a CPU, or where it is not known. Raises UsageError for a cache that the engine has not.
    """
    algorithm = quantization.kv_cache_algorithm if quantization is not None else None
    if asked == "auto" and algorithm not in (None, "FP8"):
        raise UsageError(
            f"{quantization and quantization.source}: the torch engine has no {algorithm} KV cache; set "
            "kv_cache_config.dtype to fp8 or bfloat16"
        )
    if asked == "fp8" or (asked == "auto" and algorithm == "FP8"):
        if capability is not None and capability < FP8_CAPABILITY:
            raise UsageError(
                "kv_cache_config.dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later; set it to "
                "bfloat16"
            )
        return FP8_DTYPE
    return _dtype(asked, field="kv_cache_config.dtype", auto=computed)


def _dtype(asked: str, *, field: str, auto: str) -> str:
    if asked == "auto":
        return auto
    if asked not in DTYPES:
        raise UsageError(f"{field} is {asked!r}; expected {LIMITS[field].expected}")
    return asked


def stored_names(directory: Path, architecture: str) -> frozenset[str] | None:
    """The decoder's tensors that a checkpoint's files hold; None where its weights are drawn, or not all there."""
    tensors = stored_tensors(directory)
    if tensors is None:
        return None
    names = (decoder_name(architecture, name) for name in tensors)
    return frozenset(name for name in names if name is not None)


def layer_bytes(
    config: ModelConfig, layer: int, *, dtype: str, scaled_products: bool, stored: Collection[str] | None
) -> int:
    """Weights of one layer on the device. ``stored``: of :func:`stored_names`; a tensor that it lacks takes nothing.

    Merged FP8 weights whose parts have scales of their own keep 4 bytes a row more; exports by ``trtx build`` have one.
    """
    products = layer_products(config, layer).values()
    norms = sum(norm.nbytes(dtype) for norm in layer_norms(config, layer).values())
    held = sum(_product_bytes(product, dtype, scaled_products, stored) for product in products)
    return _KV_SCALE_BYTES + norms + held


def _product_bytes(product: Product, dtype: str, scaled_products: bool, stored: Collection[str] | None) -> int:
    bias = product.rows * DTYPE_BYTES[dtype] if product.has_bias else 0
    first = product.modules[0]
    if product.is_kept(scaled_products=scaled_products):
        weights = sum(module.tensors["weight"].nbytes(dtype) for module in product.modules)
        return bias + weights + sum(first.tensors[scale].nbytes(dtype) for scale in ("weight_scale", "input_scale"))
    stays = product.loading.stays if product.loading is not None else ()
    beside = sum(
        first.tensors[suffix].nbytes(dtype) for suffix in stays if stored is None or f"{first.name}.{suffix}" in stored
    )
    return bias + product.rows * product.columns * DTYPE_BYTES[dtype] + beside


def vocabulary_bytes(config: ModelConfig, dtype: str) -> int:
    """Of the embedding, and of the head where it is not tied to it."""
    return config.vocab_size * config.hidden_size * DTYPE_BYTES[dtype]


def tower_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Of the vision tower and its projector, which the encoder holds; 0 without one. ``config``: the whole file."""
    return sum(math.prod(shape) for shape in tower_tensors(config).values()) * DTYPE_BYTES[dtype]


def activation_bytes(
    config: ModelConfig, *, max_num_tokens: int, max_batch_size: int, dtype: str, scaled_products: bool
) -> int:
    """Peak of a pass over ``max_num_tokens``: the widest moment is the MLP's, plus logits and what is made of them.

    Where activations are rounded to a format that no product here takes, what that holds of the widest comes on top.
    """
    width = DTYPE_BYTES[dtype]
    token = 2 * config.hidden_size + max(3 * config.intermediate_size, 2 * config.q_size + 2 * config.kv_size)
    logits = max_batch_size * config.vocab_size * (2 * width + 4)
    # Logprobs of 256 of a prompt's tokens, or counts of every row's tokens and logprobs of 64 rows. What penalties make
    # of every row's logits is the float32 above.
    sampler = config.vocab_size * max(256 * 10, max_batch_size * 4 + 64 * 12)
    tokens = max_num_tokens + padded_tokens(max_num_tokens)  # CUDA graphs keep their own
    return tokens * (token * width + _rounding_bytes(config, scaled_products)) + logits + sampler


@lru_cache(maxsize=4)  # asked again for each size that a refusal tries
def _rounding_bytes(config: ModelConfig, scaled_products: bool) -> int:
    """A token's share of the widest input that is rounded before a dequantized weight multiplies it."""
    if config.quantization is None:
        return 0
    rounded = (
        product.loading.rounding_bytes * product.columns
        for layer in range(config.num_layers)
        for product in layer_products(config, layer).values()
        if product.loading is not None and not product.is_kept(scaled_products=scaled_products)
    )
    return max(rounded, default=0)


def padding_layers(windows: Sequence[int | None]) -> int:
    """Layers that a token's blocks have room for beside the model's own."""
    size = block_layers(windows)
    return sum(-count % size for count in Counter(windows).values())


def pool_room(left: int, fraction: float) -> int:
    """Bytes of a GPU for KV, of those ``left`` after weights, activations and reserve."""
    return int(max(0, left) * fraction)


def cpu_pool_room(block_bytes: int, tokens_per_block: int) -> int:
    """Bytes of a host for KV where ``max_tokens`` is silent."""
    return min(-(-_CPU_TOKENS // tokens_per_block) * block_bytes, _CPU_BYTES)

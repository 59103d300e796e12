"""The memory formulas of the torch engine, which the plan and the engine's runner share. Imports no torch.

The runner loads the weights and then queries the free memory of its device; only these functions compute its use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtx.checkpoint.dense import (
    ExpertProducts,
    Product,
    expert_products,
    layer_norms,
    layer_products,
    layer_vectors,
)
from trtx.checkpoint.formats import (
    DTYPE_BYTES,
    DTYPES,
    FP8_BLOCK,
    FP8_CAPABILITY,
    FP8_DTYPE,
    ROW_SCALES,
    TENSOR_SCALES,
    padded_blocks,
)
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.quantization import Quantization
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import stored_tensors
from trtx.config.torch_groups import block_layers
from trtx.config.torch_limits import LIMITS
from trtx.config.torch_passes import most_drafted, padded_tokens
from trtx.errors import UsageError
from trtx.memory.processor import cpu_dtype

RESERVE_BYTES = 1 << 30
"""GPU memory reserved for cuBLAS workspaces, CUDA graphs and fragmentation of the allocator."""
_CPU_TOKENS = 65536  # room for 16 sequences of 4,096 tokens
_CPU_BYTES = 1 << 30
_SCALE_BYTES = 4  # float32
_MASK_WORD_BYTES = 4  # int32
_KV_SCALE_BYTES = 2 * _SCALE_BYTES  # per layer: the scales of keys and of values


def compute_dtype(asked: str, own: str, *, is_gpu: bool) -> str:
    """Returns the dtype that the engine computes in.

    It is ``asked`` or, for "auto", the checkpoint's dtype ``own`` on a GPU and
    :func:`trtx.memory.processor.cpu_dtype` on a CPU. Raises UsageError.
    """
    return _dtype(asked, field="dtype", auto=own if is_gpu else cpu_dtype(own))


def kv_dtype(asked: str, quantization: Quantization | None, computed: str, capability: tuple[int, int] | None) -> str:
    """Returns the dtype of the KV cache.

    As in TensorRT-LLM, "auto" follows the checkpoint's ``kv_cache_quant_algo``; without one it is ``computed``.
    ``capability``: None on a CPU, or if unknown. Raises UsageError for a dtype that the engine does not support.
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
    """Returns the names of the decoder's tensors in a checkpoint's files.

    None if the weights are generated, or if files are missing.
    """
    tensors = stored_tensors(directory)
    if tensors is None:
        return None
    names = (decoder_name(architecture, name) for name in tensors)
    return frozenset(name for name in names if name is not None)


def norm_dtype(config: ModelConfig, dtype: str) -> str:
    """Returns the dtype of the norms of a model whose other weights have ``dtype``."""
    return "float32" if config.arithmetic.norm_adds_one else dtype  # the sum with 1


def layer_bytes(
    config: ModelConfig, layer: int, *, dtype: str, scaled_products: frozenset[str], stored: Collection[str] | None
) -> int:
    """Returns the bytes of one layer's weights on the device.

    ``stored``: the result of :func:`stored_names`; a missing tensor takes no memory. Merged FP8 weights whose parts
    have different scales take 4 more bytes per row; exports by ``trtx build`` have one scale.
    """
    products = layer_products(config, layer).values()
    norms = sum(vector.nbytes(norm_dtype(config, dtype)) for vector in layer_norms(config, layer).values())
    norms += sum(vector.nbytes(dtype) for vector in layer_vectors(config, layer).values())
    held = sum(_product_bytes(product, dtype, scaled_products, stored) for product in products)
    if (experts := expert_products(config, layer)) is not None:
        router = math.prod(config.router_shape) * DTYPE_BYTES[dtype]
        held += router + _expert_bytes(experts, dtype, scaled_products)
    return _KV_SCALE_BYTES + norms + held


def _product_bytes(
    product: Product, dtype: str, scaled_products: frozenset[str], stored: Collection[str] | None
) -> int:
    bias = product.rows * DTYPE_BYTES[dtype] if product.has_bias else 0
    first = product.modules[0]
    if product.is_kept(scaled_products=scaled_products):
        return bias + sum(module.tensors["weight"].nbytes(dtype) for module in product.modules) + _scale_bytes(product)
    stays = product.loading.stays if product.loading is not None else ()
    beside = sum(
        first.tensors[suffix].nbytes(dtype) for suffix in stays if stored is None or f"{first.name}.{suffix}" in stored
    )
    return bias + product.rows * product.columns * DTYPE_BYTES[dtype] + beside


def _scale_bytes(product: Product) -> int:
    """Returns the bytes of the scales beside a weight that stays as stored."""
    assert product.loading is not None
    if product.loading.product == TENSOR_SCALES:
        return 2 * _SCALE_BYTES  # the weight's and the input's
    if product.loading.product == ROW_SCALES:
        return product.rows * _SCALE_BYTES
    return product.rows // FP8_BLOCK * padded_blocks(product.columns) * _SCALE_BYTES


def _expert_bytes(experts: ExpertProducts, dtype: str, scaled_products: frozenset[str]) -> int:
    if not experts.is_kept(scaled_products=scaled_products):
        scales = experts.loading.stays if experts.loading is not None else ()
        inputs = 2 * _SCALE_BYTES * len(scales)  # those of the experts' input and of their gated input
        columns = int(experts.has_bias)  # a bias is one more column
        return inputs + sum(module.rows * (module.columns + columns) for module in experts.modules) * DTYPE_BYTES[dtype]
    weights = sum(module.tensors["weight"].nbytes(dtype) for module in experts.modules)
    return weights + _SCALE_BYTES * (len(experts.modules) + 2)  # one for each weight, and the inputs' two


def vocabulary_bytes(config: ModelConfig, dtype: str) -> int:
    """Returns the bytes of the embedding; an untied head has the same size."""
    return config.vocab_size * config.hidden_size * DTYPE_BYTES[dtype]


def tower_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Returns the bytes of the vision tower and its projector in the encoder; 0 without one.

    ``config``: the whole ``config.json``.
    """
    return sum(math.prod(shape) for shape in tower_tensors(config).values()) * DTYPE_BYTES[dtype]


def activation_bytes(
    config: ModelConfig,
    *,
    max_num_tokens: int,
    max_batch_size: int,
    dtype: str,
    scaled_products: frozenset[str],
    max_draft_len: int = 0,
) -> int:
    """Returns the peak memory of a forward over ``max_num_tokens``: widest activations, logits, and the sampler.

    With ``max_draft_len``, the hidden states, logits and vocabulary masks of the drafted tokens of a step are added.
    If activations are rounded to a format between two operations, the rounding of the widest input is added.
    """
    width = DTYPE_BYTES[dtype]
    token = 2 * config.hidden_size + max(_mlp_elements(config), 2 * config.q_size + 2 * config.kv_size)
    logits = max_batch_size * config.vocab_size * (2 * width + 4)
    # Log-probabilities of 256 prompt tokens at a time, or token counts of every row and log-probabilities of 64 rows.
    # The logits with penalties of every row are the float32 part above.
    sampler = config.vocab_size * max(256 * 10, max_batch_size * 4 + 64 * 12)
    tokens = max_num_tokens + padded_tokens(max_num_tokens)  # CUDA graphs keep activations of their own
    forward = tokens * (token * width + _rounding_bytes(config, scaled_products))
    drafted = most_drafted(max_batch_size, max_draft_len)
    # Rows after the same number of drafted tokens are sampled together, within the float32 part above.
    drafts = drafted * (config.hidden_size + 2 * config.vocab_size) * width
    masks = max_batch_size * max_draft_len * -(-config.vocab_size // 32) * _MASK_WORD_BYTES
    return forward + logits + sampler + drafts + masks


def _mlp_elements(config: ModelConfig) -> int:
    """Returns the elements per token in the widest MLP.

    For experts: the gated input and the output of each, and on a CPU the widest activations of one of them.
    """
    dense = 3 * config.intermediate_size
    experts = config.experts
    if experts is None or not any(experts.sparse):
        return dense
    hidden, inner = config.hidden_size, experts.intermediate_size
    routed = experts.per_token * (hidden + inner) + 2 * hidden + 3 * inner
    return routed if all(experts.sparse) else max(dense, routed)


@lru_cache(maxsize=4)  # a refusal calls it again for each size that it tries
def _rounding_bytes(config: ModelConfig, scaled_products: frozenset[str]) -> int:
    """Returns the bytes per token of the widest input that is rounded before its matmul."""
    if config.quantization is None:
        return 0
    rounded = (
        _rounded_input(product, scaled_products)
        for layer in range(config.num_layers)
        for product in layer_products(config, layer).values()
    )
    return max([*rounded, _rounded_experts(config, scaled_products)], default=0)


def _rounded_input(product: Product, scaled_products: frozenset[str]) -> int:
    if product.loading is None:
        return 0
    if not product.is_kept(scaled_products=scaled_products):
        return product.loading.rounding_bytes * product.columns
    if product.loading.product == TENSOR_SCALES:
        return 0  # the operation before the matmul gives float8
    return product.columns + -(-product.columns // FP8_BLOCK) * _SCALE_BYTES  # float8, and an upper bound of the scales


def _rounded_experts(config: ModelConfig, scaled_products: frozenset[str]) -> int:
    """Returns :func:`_rounding_bytes` of experts: a token has one gated input for each of its experts."""
    routed = [
        products.loading.rounding_bytes
        for layer in range(config.num_layers)
        if (products := expert_products(config, layer)) is not None
        and products.loading is not None
        and not products.is_kept(scaled_products=scaled_products)
    ]
    if config.experts is None or not routed:
        return 0
    return max(routed) * max(config.hidden_size, config.experts.per_token * config.experts.intermediate_size)


def padding_layers(windows: Sequence[int | None]) -> int:
    """Returns the number of padding layers in the KV blocks of a token."""
    size = block_layers(windows)
    return sum(-count % size for count in Counter(windows).values())


def pool_room(left: int, fraction: float) -> int:
    """Returns the KV bytes on a GPU. ``left``: the bytes that remain after weights, activations and reserve."""
    return int(max(0, left) * fraction)


def cpu_pool_room(block_bytes: int, tokens_per_block: int) -> int:
    """Returns the KV bytes on a CPU if ``max_tokens`` is not set."""
    return min(-(-_CPU_TOKENS // tokens_per_block) * block_bytes, _CPU_BYTES)

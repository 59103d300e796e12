"""Computes the weights and the KV of one GPU of each pipeline rank, after sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from trtx.memory.limits import Limits
from trtx.memory.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights in the engine, before sharding. ``layers``: the decoder's layers, then the draft layers."""

    layers: tuple[Counter[str], ...]
    embedding: int
    head: int
    vision: int
    norm: int
    source: str

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.vision + self.norm + sum(sum(layer.values()) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The KV of one layer on one GPU: bytes per token, and the window beyond which tokens are dropped."""

    token_bytes: float
    window: int | None


@dataclass(frozen=True, slots=True)
class RankShare:
    """The weights and the KV of one GPU of a pipeline rank."""

    rank: int
    weight_bytes: int
    kv: tuple[LayerKv, ...]
    tokens_per_block: int
    context_parallel: int

    @property
    def kv_bytes_per_token(self) -> float:
        """The KV bytes of a token that is within all windows."""
        return sum(layer.token_bytes for layer in self.kv) / self.context_parallel

    @property
    def has_windows(self) -> bool:
        return any(layer.window is not None for layer in self.kv)

    def sequence_bytes(self, tokens: int) -> int:
        """Returns the KV bytes of one sequence in whole blocks; a layer with a window keeps only the window."""
        held = ceil(sum(layer.token_bytes * self._blocks(tokens, layer.window) for layer in self.kv))
        return ceil(held * self.tokens_per_block / self.context_parallel)

    def _blocks(self, tokens: int, window: int | None) -> int:
        return -(-(tokens if window is None else min(tokens, window)) // self.tokens_per_block)


def pipeline_layers(count: int, pp: int) -> list[range]:
    """Returns the layers of each pipeline rank as in TensorRT-LLM's mapping: the first ranks take the remainder."""
    base, extra = divmod(count, pp)
    starts = [rank * base + min(rank, extra) for rank in range(pp + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(pp)]


def rank_shares(
    shape: ModelShape, weights: Weights, limits: Limits, kv_width: float, kv_padding: int
) -> list[RankShare]:
    """Returns one share for each pipeline rank; all GPUs of a rank have equal shares.

    ``kv_padding``: the number of padding layers in the KV blocks.
    """
    count = len(shape.layers)
    drafts = weights.layers[count:]
    windows = _layer_windows(limits, count)
    token_bytes = layer_kv_elements(shape, limits) * kv_width
    shares = []
    for rank, layers in enumerate(pipeline_layers(count, limits.pp)):
        is_first, is_last = rank == 0, rank == limits.pp - 1
        held = _layer_bytes((weights.layers[index] for index in layers), shape, limits)
        kv = [LayerKv(token_bytes, windows[index]) for index in layers]
        if is_first:
            # Each rank of the torch engine has the whole embedding, and its rows of the head.
            held += ceil(weights.embedding / (1 if limits.engine == "torch" else _vocabulary_ways(limits)))
            held += weights.vision
        if is_last:
            held += _layer_bytes(drafts, shape, limits) + weights.norm
            kv += [LayerKv(token_bytes, None)] * (len(drafts) + kv_padding)
            # With several pipeline ranks, the last rank holds a second copy of a tied embedding as its head.
            head = weights.head or (0 if is_first else weights.embedding)
            held += ceil(head / (limits.tp * limits.cp if limits.lm_head_tp else _vocabulary_ways(limits)))
        shares.append(RankShare(rank, held, tuple(kv), limits.tokens_per_block, limits.cp))
    return shares


def layer_kv_elements(shape: ModelShape, limits: Limits) -> int:
    """Returns the KV elements per token of one layer on one GPU.

    MLA's latent is shared by all heads and is therefore never sharded.
    """
    if shape.latent is not None:
        return shape.latent
    return 2 * _kv_heads_held(shape, limits) * shape.head_dim


def _kv_heads_held(shape: ModelShape, limits: Limits) -> int:
    """Returns the KV heads on one GPU. With more GPUs than KV heads, the heads are replicated, one on each GPU."""
    return -(-shape.kv_heads // (1 if limits.attention_dp else limits.tp))


def _layer_bytes(layers: Iterable[Counter[str]], shape: ModelShape, limits: Limits) -> int:
    total: Counter[str] = Counter()
    for layer in layers:
        total.update(layer)
    attention = 1 if limits.attention_dp else limits.tp
    # Dense MLPs and shared experts follow attention: with attention DP each rank holds all of them
    # (modeling_deepseekv3.py, _compute_mlp_tp_size). HELIX's context ranks shard the MLPs too.
    mlp = 1 if limits.attention_dp else limits.tp * limits.cp
    return (
        ceil(total["heads"] / attention)
        + ceil(total["kv_heads"] * _kv_heads_held(shape, limits) / shape.kv_heads)
        + ceil(total["mlp"] / mlp)
        + ceil(total["experts"] * _expert_share(shape, limits))
        + total["latent"]
        + total["whole"]
    )


def _expert_share(shape: ModelShape, limits: Limits) -> float:
    """Returns the share of all expert weights on one GPU. moe_tp x moe_ep = tp; EPLB's extra slots are copies."""
    if not shape.experts:
        return 0.0
    slots = max(shape.experts, limits.expert_slots)
    expert_parallel = min(limits.moe_ep, limits.tp * limits.cp)
    moe_tp = max(1, limits.tp * limits.cp // expert_parallel)
    return -(-slots // expert_parallel) / shape.experts / moe_tp


def _vocabulary_ways(limits: Limits) -> int:
    return 1 if limits.attention_dp else limits.tp * limits.cp


def _layer_windows(limits: Limits, count: int) -> tuple[int | None, ...]:
    """Returns the window of each layer in TensorRT-LLM's pool, which applies only those in max_attention_window.

    The list repeats over the layers.
    """
    if not limits.windows:
        return (None,) * count
    longest = limits.max_seq_len
    return tuple(
        None if longest is not None and window >= longest else window
        for window in (limits.windows[index % len(limits.windows)] for index in range(count))
    )

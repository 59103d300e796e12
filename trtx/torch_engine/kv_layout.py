"""The layout of KV cache blocks: KV cache groups and the geometry of the block pool. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from trtx.config.torch_groups import block_layers


def first_block(window: int | None, num_tokens: int, tokens_per_block: int) -> int:
    """Index of the first block that a query at position ``num_tokens`` or later reads through ``window``."""
    return 0 if window is None else max(0, num_tokens - window + 1) // tokens_per_block


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A KV cache group: layers that attend to the same positions. A sequence has one block list for each group."""

    layers: tuple[int, ...]  # ascending, from 0
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # sliding window, including the query's own position; None: all positions
    kind: str = "attention"  # what a block stores for each token: keys and values of attention heads

    def __str__(self) -> str:
        reach = "all positions" if self.window is None else f"a window of {self.window}"
        heads = f"{self.num_kv_heads} KV heads of {self.head_dim}"
        return f"{self.kind} of {_spans(self.layers)} to {reach}, {heads}"


def _spans(layers: tuple[int, ...]) -> str:
    """Formats layer indices; evenly spaced ones are abbreviated: ``layers 0, 2, … 22``."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if len(layers) > 3 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"layers {layers[0]}, {layers[1]}, … {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def layer_groups(windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> tuple[LayerGroup, ...]:
    """Returns the KV cache groups of a model. ``windows``: for each layer its window, or None.

    Layers with the same window share a group, up to the number of layers that one block holds.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = block_layers(windows)
    return tuple(
        LayerGroup(tuple(kinds[window][begin : begin + size]), num_kv_heads, head_dim, window)
        for window in sorted(kinds, key=lambda window: (window is not None, window or 0))
        for begin in range(0, len(kinds[window]), size)
    )


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of the KV blocks. Pool: ``[num_blocks, num_kv_heads, block_layers, 2, tokens_per_block, head_dim]``.

    A block holds all layers of one KV cache group in one contiguous range of ``block_bytes`` bytes. Heads are the
    outermost dimension of a block, so a subset of heads over all layers is contiguous too, and the tokens of one head
    in one layer are adjacent. Blocks of all groups have the same shape, so any block of the pool serves any group; a
    group with fewer layers than ``block_layers`` leaves padding. Raises ValueError if a layer is in no group or in two,
    or if groups differ in the shape of their heads.
    """

    groups: tuple[LayerGroup, ...]  # a group that attends to all positions comes first, if there is one
    tokens_per_block: int
    dtype: str  # torch's name without "torch.": "float32", "bfloat16", "float8_e4m3fn"
    scales: str = ""  # float8 pools: a digest of the dequantization scales; equal checkpoints have equal digests
    # For a deterministic engine: everything besides the checkpoint that its bits depend on. KV from another arithmetic
    # would break determinism. "": the engine makes no such promise.
    arithmetic: str = ""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ValueError(f"groups of layers {layers}; expected every layer of the model in one of them")
        if len({(group.num_kv_heads, group.head_dim, group.kind) for group in self.groups}) > 1:
            raise ValueError(f"groups {', '.join(map(str, self.groups))}; expected heads of one shape in one pool")

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        dtype: str,
        scales: str = "",
        arithmetic: str = "",
    ) -> KvGeometry:
        """Geometry of a model whose layers all attend to all positions: one KV cache group."""
        group = LayerGroup(tuple(range(num_layers)), num_kv_heads, head_dim)
        return cls((group,), tokens_per_block, dtype, scales, arithmetic)

    def with_heads(self, num_kv_heads: int) -> KvGeometry:
        """Returns the geometry of the same model with another number of heads in a block."""
        return replace(self, groups=tuple(replace(group, num_kv_heads=num_kv_heads) for group in self.groups))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each KV cache group."""
        return tuple(group.window for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer: the index of its KV cache group, and its index within a block of that group."""
        found = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    @property
    def block_layers(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Memory layout of one block: ``(num_kv_heads, block_layers, 2, tokens_per_block, head_dim)``."""
        first = self.groups[0]
        return first.num_kv_heads, self.block_layers, 2, self.tokens_per_block, first.head_dim

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype_bytes

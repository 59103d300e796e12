"""The layout of KV cache blocks: KV cache groups and the geometry of the block pool. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from trtx.config.torch_groups import block_layers


def first_block(window: int | None, num_tokens: int, tokens_per_block: int) -> int:
    """The first block that a query at position ``num_tokens``, or at any later one, sees through ``window``."""
    return 0 if window is None else max(0, num_tokens - window + 1) // tokens_per_block


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the same of a sequence's past. A sequence has one list of blocks for each group."""

    layers: tuple[int, ...]  # ascending, from 0
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # a query sees so many positions, its own the last of them; None: all before it
    kind: str = "attention"  # what a block keeps of a token: keys and values of heads

    def __str__(self) -> str:
        reach = "all positions" if self.window is None else f"a window of {self.window}"
        heads = f"{self.num_kv_heads} KV heads of {self.head_dim}"
        return f"{self.kind} of {_spans(self.layers)} to {reach}, {heads}"


def _spans(layers: tuple[int, ...]) -> str:
    """Evenly spaced layers in short: ``layers 0, 2, … 22``."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if len(layers) > 3 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"layers {layers[0]}, {layers[1]}, … {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def layer_groups(windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> tuple[LayerGroup, ...]:
    """Of a model whose layers see through ``windows``, one a layer: as many in a group as blocks hold."""
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
    """What KV blocks look like. Pool: ``[num_blocks, num_kv_heads, block_layers, 2, tokens_per_block, head_dim]``.

    A block holds all layers of one group: one contiguous range of ``block_bytes`` bytes. Heads come first in it, so
    that some heads of all its layers are one range too, and a head's tokens in a layer lie one after the other. Blocks
    of all groups have one shape, so that any block of the pool serves any group; what a group with fewer layers leaves
    of it is padding. Raises ValueError for groups that no such blocks hold.
    """

    groups: tuple[LayerGroup, ...]  # the first is one that sees all positions, where there is one
    tokens_per_block: int
    dtype: str  # torch's name without "torch.": "float32", "bfloat16", "float8_e4m3fn"
    scales: str = ""  # of a float8 pool: digest of what its values are multiplied with, equal for equal checkpoints
    # Of an engine whose answers are the same to the bit however they are computed: what its bits depend on beside the
    # checkpoint. KV of another arithmetic would break that. "": the engine promises nothing of the kind.
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
        """Of layers that all see all positions: one group."""
        group = LayerGroup(tuple(range(num_layers)), num_kv_heads, head_dim)
        return cls((group,), tokens_per_block, dtype, scales, arithmetic)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One a group."""
        return tuple(group.window for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer: its group, and its index in a block of that."""
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
        """``(num_kv_heads, block_layers, 2, tokens_per_block, head_dim)``: a block as it lies in memory."""
        first = self.groups[0]
        return first.num_kv_heads, self.block_layers, 2, self.tokens_per_block, first.head_dim

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype_bytes

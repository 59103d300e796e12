"""The number of layers in a KV block of the torch engine. The memory plan and the KV pool share this rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_GROUPS = 8
"""The maximum number of KV cache groups. Each group costs a block table and one block list for every sequence."""


def block_layers(windows: Sequence[int | None]) -> int:
    """Returns the number of layers per KV block. ``windows``: each layer's attention window in tokens; None: full.

    Layers with the same window form one or more KV cache groups of this many layers; the last group is padded. Among
    the sizes that give at most ``_MOST_GROUPS`` groups, the result is the one with the fewest padding layers, and the
    largest of those.
    """
    counts = Counter(windows).values()
    few = [size for size in range(1, max(counts) + 1) if sum(-(-count // size) for count in counts) <= _MOST_GROUPS]
    return min(few or [max(counts)], key=lambda size: (sum(-count % size for count in counts), -size))

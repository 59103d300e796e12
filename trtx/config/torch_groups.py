"""How many layers a KV block of the torch engine holds: one rule, for its plan and for its pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_GROUPS = 8
"""Each costs a block table, and a list to look after for every sequence."""


def block_layers(windows: Sequence[int | None]) -> int:
    """Of a model whose layers see through ``windows``, one a layer: those of one window are one group, or several of so
    many. Of what makes few groups, what leaves the least padding, in the largest blocks."""
    counts = Counter(windows).values()
    few = [size for size in range(1, max(counts) + 1) if sum(-(-count // size) for count in counts) <= _MOST_GROUPS]
    return min(few or [max(counts)], key=lambda size: (sum(-count % size for count in counts), -size))

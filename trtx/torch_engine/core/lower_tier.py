"""The interface through which a block pool uses the tier below it, such as host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class LowerTier(Protocol):
    """The methods of a tier that the block pool above it calls."""

    stores_ahead: bool
    """Whether the tier asks for the blocks that are evicted next, to copy them before that."""

    def evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """The pool evicts these (block, name) pairs and reuses the blocks; ``HostTier`` may still copy them first."""

    def forget(self, names: Iterable[bytes]) -> None:
        """Forgets these contents: no later prompt may find them."""

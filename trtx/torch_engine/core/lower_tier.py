"""What the pool of one tier needs of the tier below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class LowerTier(Protocol):
    """What a pool tells the tier below it."""

    def holds(self, name: bytes) -> bool:
        """Whether the tier has a copy of this content, or is making one."""

    def evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """The pool gives these blocks to other contents at once; the tier may still copy them: see ``HostTier``."""

    def forget(self, names: Iterable[bytes]) -> None:
        """These contents must not be found again."""

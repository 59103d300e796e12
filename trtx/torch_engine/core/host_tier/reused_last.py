"""The order in which contents are evicted from host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from trtx.torch_engine.core.eviction_order import EvictionOrder


class ReusedLast(EvictionOrder):
    """Of blocks with one priority, those that prompts needed once come before those that they needed again.

    At most ``most_reused`` blocks count as needed again. If there are more, the one of them that was used longest ago
    counts as needed once, and just used. So contents that no prompt needs any more leave in the end.
    """

    def __init__(self, is_reused: Callable[[int], bool], most_reused: int) -> None:
        """``is_reused``: whether prompts needed a block's content again; asked when the block is added."""
        super().__init__()
        self._is_reused = is_reused
        self._most_reused = most_reused
        self._reused: OrderedDict[int, int] = OrderedDict()  # blocks and their priorities, oldest use first

    def add(self, block_id: int, priority: int) -> None:
        if not self._is_reused(block_id):
            super().add(block_id, 2 * priority)
            return
        super().add(block_id, 2 * priority + 1)
        self._reused[block_id] = priority
        if len(self._reused) > self._most_reused:
            oldest, its_priority = next(iter(self._reused.items()))
            self.discard(oldest)
            super().add(oldest, 2 * its_priority)

    def discard(self, block_id: int) -> None:
        self._reused.pop(block_id, None)
        super().discard(block_id)

    def pop(self) -> int:
        block_id = super().pop()
        self._reused.pop(block_id, None)
        return block_id

"""The order in which cached blocks are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class EvictionOrder:
    """A set of blocks, by retention priority and then by last use: the lowest priority comes first, then the oldest."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, None]] = {}  # by priority, ascending
        self._priorities: dict[int, int] = {}  # of each block

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._priorities

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues.values():
            yield from queue

    def add(self, block_id: int, priority: int) -> None:
        """Adds a block as the most recently used one of its priority."""
        queue = self._queues.get(priority)
        if queue is None:
            self._queues[priority] = queue = OrderedDict()
            self._queues = dict(sorted(self._queues.items()))
        queue[block_id] = None
        self._priorities[block_id] = priority

    def add_first(self, block_id: int, priority: int) -> None:
        """Adds a block as the one of its priority that was used longest ago."""
        self.add(block_id, priority)
        self._queues[priority].move_to_end(block_id, last=False)

    def discard(self, block_id: int) -> None:
        priority = self._priorities.pop(block_id, None)
        if priority is not None:
            del self._queues[priority][block_id]

    def first(self) -> int:
        """Returns the block that is evicted next. Raises StopIteration without blocks."""
        return next(iter(self))

    def pop(self) -> int:
        """Removes and returns the block that is evicted next. Raises StopIteration without blocks."""
        queue = next(queue for queue in self._queues.values() if queue)
        block_id, _ = queue.popitem(last=False)
        del self._priorities[block_id]
        return block_id

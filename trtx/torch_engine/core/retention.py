"""How long blocks are kept: the retention priorities of a request, and of the blocks that it used."""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heappop, heappush

from trtx.torch_engine.messages import KvRetention, Retained

DEFAULT_PRIORITY = 35
"""Retention priority of a block for which no request asked for another: TensorRT-LLM's default."""


def retained_block(retention: KvRetention, index: int, prompt_length: int, tokens_per_block: int) -> Retained | None:
    """Returns the retention of a sequence's block ``index``; None: the request asks for none.

    As in TensorRT-LLM, the range that holds the block's first token applies. Blocks after the prompt have the retention
    of generated tokens.
    """
    start = index * tokens_per_block
    if start >= prompt_length:
        return retention.decode
    for held in retention.ranges:
        if held.start <= start and (held.end is None or start < held.end):
            return held.retained
    return None


class BlockPriorities:
    """The retention priority of every block of a pool. A priority with a duration ends when this time has passed since
    the last use.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._retained: dict[int, Retained] = {}  # blocks with another priority than the default
        self._ends: list[tuple[float, int, int]] = []  # (deadline, block, number of its last use)
        self._uses: dict[int, int] = {}  # of blocks with a duration
        self._count = 0

    def of(self, block_id: int) -> int:
        retained = self._retained.get(block_id)
        return DEFAULT_PRIORITY if retained is None else retained.priority

    def retained(self, block_id: int) -> Retained | None:
        return self._retained.get(block_id)

    def set(self, block_id: int, retained: Retained) -> None:
        self._retained[block_id] = retained

    def clear(self, block_id: int) -> None:
        """Forgets a block's priority, because the block has another content from now on."""
        if self._retained and self._retained.pop(block_id, None) is not None:
            self._uses.pop(block_id, None)

    def begin(self, block_id: int) -> int:
        """Starts the duration of a block's priority: no sequence uses the block any more. Returns the priority."""
        retained = self._retained.get(block_id) if self._retained else None
        if retained is None:
            return DEFAULT_PRIORITY
        if retained.duration_s is not None:
            self._count += 1
            self._uses[block_id] = self._count
            heappush(self._ends, (self._clock() + retained.duration_s, block_id, self._count))
        return retained.priority

    def take_expired(self) -> list[int]:
        """Resets the priorities whose duration has passed to the default, and returns their blocks."""
        if not self._ends:
            return []
        now = self._clock()
        expired: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            _, block_id, use = heappop(self._ends)
            if self._uses.get(block_id) == use:
                self.clear(block_id)
                expired.append(block_id)
        return expired

"""KV cache groups and a sequence's blocks: which blocks each group still needs, and what counts as a cached prefix.

A sequence has one list of block ids for each group, all of the same length: entry i holds positions
``[i * tokens_per_block, (i + 1) * tokens_per_block)``. For a group with a window, leading blocks are released as the
sequence proceeds; their entries stay in the list, but are stale.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import chain, zip_longest

from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.retention import retained_block
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.kv_layout import first_block
from trtx.torch_engine.messages import KvRetention

NO_BLOCK = 0
"""Filler entry for a position before a group's window, for which no block was allocated."""


def group_name(name: bytes, group: int) -> bytes:
    """The pool's name for the block of ``group`` with content ``name``.

    The first group uses ``name`` unchanged; only its blocks are reported to routers.
    """
    return name + bytes([group]) if group else name


class LayerGroups:
    """The KV cache groups of one model over one pool. ``windows``: one for each group; see ``KvGeometry.groups``."""

    def __init__(self, pool: BlockPool, windows: SequenceOf[int | None] = (None,)) -> None:
        self.count = len(windows)
        self._pool = pool
        self._windows = tuple(windows)
        self.have_windows = any(window is not None for window in windows)

    def first(self, group: int, num_tokens: int) -> int:
        """Index of the first block that a query after ``num_tokens`` tokens, or any later query, reads."""
        return first_block(self._windows[group], num_tokens, self._pool.tokens_per_block)

    def match(
        self, names: SequenceOf[bytes], is_below: Callable[[bytes], bool] | None = None
    ) -> tuple[int, list[list[int | None]]]:
        """Returns the length in blocks of the longest usable cached prefix, and the blocks of each group that it needs.

        A prefix is usable if the cache has all blocks that a query right after it reads. ``is_below``: whether a lower
        tier has a content; such a block is None. Adds no references, like :meth:`BlockPool.match`.
        """
        if not self.have_windows and self.count == 1:
            matched: list[int | None] = [*self._pool.match(names)]
            while is_below is not None and len(matched) < len(names):
                name = names[len(matched)]
                found = self._pool.find(name)
                if found is None and not is_below(name):
                    break
                matched.append(found)
            return len(matched), [matched]
        length = len(names) if self._pool.enable_reuse else 0
        before = -1
        while length != before:  # a block that one group lacks shortens the prefix for all groups
            before = length
            for group in range(self.count):
                length = self._reach(names, group, length, is_below)
        return length, [self._blocks(names, group, length) for group in range(self.count)]

    def _reach(
        self, names: SequenceOf[bytes], group: int, length: int, is_below: Callable[[bytes], bool] | None
    ) -> int:
        """Longest prefix, at most ``length`` blocks, whose blocks that a query reads in ``group`` are all cached."""

        def is_missing(index: int) -> bool:
            name = group_name(names[index], group)
            return self._pool.find(name) is None and (is_below is None or not is_below(name))

        size, window = self._pool.tokens_per_block, self._windows[group]
        if window is None:
            return next((index for index in range(length) if is_missing(index)), length)
        index = length
        while index > first_block(window, length * size, size):
            index -= 1
            if is_missing(index):
                length = index
        return length

    def _blocks(self, names: SequenceOf[bytes], group: int, length: int) -> list[int | None]:
        first = self.first(group, length * self._pool.tokens_per_block)
        return [self._pool.find(group_name(name, group)) for name in names[first:length]]

    def lists(self, length: int, matched: list[list[int]], fresh: list[int]) -> list[list[int]]:
        """Builds the block list of each group for admission.

        The first ``length`` entries are the prefix: the group's ``matched`` blocks at its end, filler before them. The
        group's share of ``fresh`` follows.
        """
        share = len(fresh) // self.count
        return [
            [NO_BLOCK] * (length - len(blocks)) + blocks + fresh[group * share : (group + 1) * share]
            for group, blocks in enumerate(matched)
        ]

    def exported(self, num_tokens: int) -> list[range]:
        """For each group: the range of blocks that a query after ``num_tokens`` tokens reads. A handoff sends these."""
        count = -(-num_tokens // self._pool.tokens_per_block)
        return [range(self.first(group, num_tokens), count) for group in range(self.count)]

    def missing(
        self, block_ids: list[list[int]], num_reused: int, num_tokens: int
    ) -> tuple[SequenceOf[int], list[int]]:
        """Returns which exported blocks must be read from a peer, and the local blocks that receive them.

        The first ``num_reused`` blocks of each group are already here. The first result holds indices into the exported
        blocks of all groups, concatenated; the second holds local block ids in the same order.
        """
        at: list[range] = []
        local: list[int] = []
        begun = 0
        for blocks, sent in zip(block_ids, self.exported(num_tokens), strict=True):
            begin = max(num_reused, sent.start)
            at.append(range(begun + begin - sent.start, begun + len(sent)))
            local += blocks[begin : sent.stop]
            begun += len(sent)
        return at[0] if self.count == 1 else list(chain(*at)), local

    def register(self, sequence: Sequence) -> None:
        """Gives the pool the names of blocks that ``num_written`` tokens fill, so that other sequences find them."""
        if not self._pool.enable_reuse:
            return
        size = self._pool.tokens_per_block
        first, full = sequence.num_registered, sequence.num_written // size
        if full > first:
            names = sequence.names(full, size)
            for group, (blocks, left) in enumerate(zip(sequence.block_ids, sequence.num_left, strict=True)):
                begin = max(first, left)
                self._pool.register(
                    blocks[begin:full],
                    [group_name(name, group) for name in names[begin:full]] if group else names[begin:full],
                    names[begin - 1] if begin else None,
                    [
                        None if group or begin > first else sequence.event_tokens(index * size, (index + 1) * size)
                        for index in range(begin, full)
                    ],
                    sequence.cache_salt,
                )
            sequence.num_registered = full
            if sequence.retention is not None:
                self.retain(sequence, sequence.retention, range(first, full))

    def retain(self, sequence: Sequence, retention: KvRetention, indices: range) -> None:
        """Applies a request's retention to those of the sequence's blocks that the pool knows by name."""
        size = self._pool.tokens_per_block
        for index in indices:
            retained = retained_block(retention, index, len(sequence.prompt_token_ids), size)
            if retained is not None:
                for group in range(self.count):
                    self._pool.retain(group_name(sequence.block_names[index], group), retained)

    def settle_blocks(self, sequence: Sequence) -> None:
        """Registers full blocks and releases blocks before a window.

        Call it after ``num_written`` has passed a block's end.
        """
        self.register(sequence)
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Releases blocks before a group's window: no step in flight and no later step reads them."""
        if not self.have_windows:
            return
        for group, (blocks, left) in enumerate(zip(sequence.block_ids, sequence.num_left, strict=True)):
            first = self.first(group, sequence.num_written)
            if first > left:
                self._pool.release(blocks[left:first])
                sequence.num_left[group] = first

    def forget(self, sequence: Sequence) -> None:
        """Makes unfindable all blocks that a sequence holds, and those that it has released."""
        for group, (blocks, left) in enumerate(zip(sequence.block_ids, sequence.num_left, strict=True)):
            given_back = (self._pool.find(group_name(name, group)) for name in sequence.block_names[:left])
            self._pool.forget([*blocks[left:], *(block_id for block_id in given_back if block_id is not None)])
            if self._pool.below is not None:  # what the device has no more
                self._pool.below.forget([group_name(name, group) for name in sequence.block_names])

    @staticmethod
    def by_age(held: list[list[int]]) -> list[int]:
        """Merges block lists that end at the same position into one for ``release``; the first are evicted last."""
        if len(held) == 1:
            return held[0]
        columns = zip_longest(*(reversed(blocks) for blocks in held))
        return [block_id for column in columns for block_id in column if block_id is not None][::-1]

"""What groups of layers mean for a sequence's blocks: which of them each group still needs, and what a prefix is.

Every group has a list of block ids of its own for a sequence, all of one length: entry i is of positions
``[i * tokens_per_block, (i + 1) * tokens_per_block)``. Of a group with a window the leading entries are given back as
the sequence goes on, and stay in the list as numbers that mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import chain, zip_longest

from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.kv_layout import first_block

NOBODYS = 0
"""In place of a block that a group's window left behind before there was one."""


def group_name(name: bytes, group: int) -> bytes:
    """What the pool calls the block of ``group`` that holds what ``name`` says. The first group's are the plain ones,
    which alone are told to routers."""
    return name + bytes([group]) if group else name


class LayerGroups:
    """The groups of one model over one pool. ``windows``: of each group; see ``KvGeometry.groups``."""

    def __init__(self, pool: BlockPool, windows: SequenceOf[int | None] = (None,)) -> None:
        self.count = len(windows)
        self._pool = pool
        self._windows = tuple(windows)
        self.have_windows = any(window is not None for window in windows)

    def first(self, group: int, num_tokens: int) -> int:
        """The first block that a query behind ``num_tokens`` tokens, or a later one, sees."""
        return first_block(self._windows[group], num_tokens, self._pool.tokens_per_block)

    def match(self, names: SequenceOf[bytes]) -> tuple[int, list[list[int]]]:
        """How many leading blocks the cache has as far as a query behind them sees, and of each group those blocks.

        Takes no reference, as :meth:`BlockPool.match`.
        """
        if not self.have_windows and self.count == 1:
            matched = self._pool.match(names)
            return len(matched), [matched]
        length = len(names) if self._pool.enable_reuse else 0
        before = -1
        while length != before:  # what one group lacks shortens what the others need
            before = length
            for group in range(self.count):
                length = self._reach(names, group, length)
        return length, [self._blocks(names, group, length) for group in range(self.count)]

    def _reach(self, names: SequenceOf[bytes], group: int, length: int) -> int:
        """The most leading blocks, at most ``length``, behind which a query finds all that it sees."""
        size, window = self._pool.tokens_per_block, self._windows[group]
        if window is None:
            for index in range(length):
                if self._pool.find(group_name(names[index], group)) is None:
                    return index
            return length
        index = length
        while index > first_block(window, length * size, size):
            index -= 1
            if self._pool.find(group_name(names[index], group)) is None:
                length = index
        return length

    def _blocks(self, names: SequenceOf[bytes], group: int, length: int) -> list[int]:
        first = self.first(group, length * self._pool.tokens_per_block)
        found = [self._pool.find(group_name(name, group)) for name in names[first:length]]
        assert None not in found
        return [block_id for block_id in found if block_id is not None]

    def lists(self, length: int, matched: list[list[int]], fresh: list[int]) -> list[list[int]]:
        """Of each group: ``length`` blocks of a prefix, of which it has the last as ``matched``, and its fresh ones."""
        share = len(fresh) // self.count
        return [
            [NOBODYS] * (length - len(blocks)) + blocks + fresh[group * share : (group + 1) * share]
            for group, blocks in enumerate(matched)
        ]

    def exported(self, num_tokens: int) -> list[range]:
        """Of each group: the blocks that a query behind ``num_tokens`` tokens sees, which are what a handoff sends."""
        count = -(-num_tokens // self._pool.tokens_per_block)
        return [range(self.first(group, num_tokens), count) for group in range(self.count)]

    def missing(
        self, block_ids: list[list[int]], num_reused: int, num_tokens: int
    ) -> tuple[SequenceOf[int], list[int]]:
        """Of a prompt whose first ``num_reused`` blocks are here: which of the exported blocks are not, by their places
        among those, and where they belong."""
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
        """Makes the blocks that ``num_written`` fills, and that the sequence holds, findable."""
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
                )
            sequence.num_registered = full

    def settle_blocks(self, sequence: Sequence) -> None:
        """``num_written`` has passed a block's end: others find what is full, and what nobody sees more is let go."""
        self.register(sequence)
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Lets go of blocks that lie before a group's window: what a step under way computes, or a later one, sees
        nothing of them."""
        if not self.have_windows:
            return
        for group, (blocks, left) in enumerate(zip(sequence.block_ids, sequence.num_left, strict=True)):
            first = self.first(group, sequence.num_written)
            if first > left:
                self._pool.release(blocks[left:first])
                sequence.num_left[group] = first

    def forget(self, sequence: Sequence) -> None:
        """Nobody shall reuse what a sequence has computed, nor what it has given back."""
        for group, (blocks, left) in enumerate(zip(sequence.block_ids, sequence.num_left, strict=True)):
            given_back = (self._pool.find(group_name(name, group)) for name in sequence.block_names[:left])
            self._pool.forget([*blocks[left:], *(block_id for block_id in given_back if block_id is not None)])

    @staticmethod
    def by_age(held: list[list[int]]) -> list[int]:
        """Lists of blocks that end at one position, as one: what comes first is to be evicted last."""
        if len(held) == 1:
            return held[0]
        columns = zip_longest(*(reversed(blocks) for blocks in held))
        return [block_id for column in columns for block_id in column if block_id is not None][::-1]

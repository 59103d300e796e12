"""Which KV heads each rank of an engine holds, and which of them one rank copies from one rank of another engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The KV heads of the model, and the ranks that split them. With more ranks than heads, ranks share a head."""

    heads: int
    ranks: int = 1

    def of(self, rank: int) -> range:
        """Returns the heads that ``rank`` holds."""
        held = max(1, self.heads // self.ranks)
        first = rank * (self.heads // held) // self.ranks * held
        return range(first, first + held)

    def sources(self, wanted: range) -> Iterator[tuple[int, HeadCopy]]:
        """Yields each rank to copy from, and the heads to copy, so that a block of ``wanted`` gets each head once."""
        missing = wanted.start
        for rank in range(self.ranks):
            held = self.of(rank)
            end = min(held.stop, wanted.stop)
            if held.start <= missing < end:
                yield (
                    rank,
                    HeadCopy(
                        source=missing - held.start, target=missing - wanted.start, count=end - missing,
                        source_heads=len(held), target_heads=len(wanted),
                    ),
                )  # fmt: skip
                missing = end


class HeadCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies ``count`` adjacent heads of each block: head ``source`` of a block goes to head ``target`` of another.

    ``source_heads`` and ``target_heads``: how many heads the blocks of the two pools have.
    """

    source: int
    target: int
    count: int
    source_heads: int
    target_heads: int

    @property
    def is_whole(self) -> bool:
        """Whether blocks are copied as they are."""
        return self.count == self.source_heads == self.target_heads

    def spans(self, block_bytes: int) -> CopySpans:
        """Returns where the heads lie in blocks. ``block_bytes``: size of a block of the target pool."""
        head = block_bytes // self.target_heads
        return CopySpans(self.source_heads * head, self.source * head, self.target * head, self.count * head)


@dataclass(frozen=True, slots=True)
class CopySpans:
    """The bytes to copy of each block."""

    source_block: int  # bytes of a block of the source
    source: int  # first byte in a block of the source
    target: int  # first byte in a block of the target
    length: int

    @classmethod
    def whole(cls, block_bytes: int) -> CopySpans:
        return cls(block_bytes, 0, 0, block_bytes)

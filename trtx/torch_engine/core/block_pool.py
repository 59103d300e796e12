"""The paged KV pool as numbers: which block is free, held or cached, and what its contents are called. No tensors.

A block is in exactly one of three states:

    free    refs == 0, no name      in the free stack
    held    refs  > 0               by sequences or leases; with a name once it is full and findable
    cached  refs == 0, with a name  in LRU order; taken again by a prefix hit, or evicted by ``allocate``

``free + held + cached == num_blocks`` after every call.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from trtx.torch_engine.core.kv_events import KvEventLog

NAME_BYTES = 32
"""A hit compares names, never tokens, and a client chooses its tokens: no two contents, and no two salts, that anybody
could find may share a name. 256 bits cost what 64 do: both fill the hash's blocks of 128 bytes alike."""
_ROOT = bytes(NAME_BYTES)
_WITH_MEDIA = b"media"


def root_name(cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block. Sequences with other salts share no block."""
    return _ROOT if cache_salt is None else blake2b(cache_salt.encode(), digest_size=NAME_BYTES).digest()


def block_name(parent: bytes, tokens: Sequence[int], media: bytes = b"") -> bytes:
    """Name of a full block: of its tokens (32-bit ids) and of everything before it, by the preceding block's name.

    ``media``: what its placeholders stand for (:func:`trtx.torch_engine.core.media.media_identity`). Equal in every
    process and on every machine of one byte order, so engines that share nothing agree on it.
    """
    contents = parent + array("i", tokens).tobytes()
    if not media:
        return blake2b(contents, digest_size=NAME_BYTES).digest()
    return blake2b(
        contents + media, digest_size=NAME_BYTES, person=_WITH_MEDIA
    ).digest()  # no text block's, of any size


@dataclass(slots=True)
class PoolCounters:
    """Totals since the engine started, as TensorRT-LLM's ``kvCacheStats`` counts them."""

    allocated: int = 0  # blocks handed out: new and reused
    allocated_new: int = 0
    reused: int = 0
    missed: int = 0  # full prompt blocks that were looked up and not found

    @property
    def hit_rate(self) -> float:
        looked_up = self.reused + self.missed
        return self.reused / looked_up if looked_up else 0.0


class BlockPool:
    """Owns who holds which block. A caller owns one reference for each block that it was given or took."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, *, enable_reuse: bool = True, events: KvEventLog | None = None
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {tokens_per_block} tokens; expected at least 1 of each")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self.counters = PoolCounters()
        self._events = events
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # name -> block, held or cached
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._untold: set[bytes] = set()  # names in _block_of that no event has told of

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def match(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. Takes no reference: call ``take`` before anything allocates."""
        matched: list[int] = []
        if self.enable_reuse:
            for name in names:
                block_id = self._block_of.get(name)
                if block_id is None:
                    break
                matched.append(block_id)
        return matched

    def find(self, name: bytes) -> int | None:
        """The block of that name, held or cached."""
        return self._block_of.get(name)

    def num_evictable(self, block_ids: Iterable[int]) -> int:
        """How many of them count in ``num_available`` now and would not after ``take``."""
        return sum(not self._refs[block_id] for block_id in block_ids)

    def take(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to blocks that ``match`` returned."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            self._refs[block_id] += 1
        self.counters.allocated += len(block_ids)
        self.counters.reused += len(block_ids)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with undefined contents and one reference each, or None and nothing changed."""
        if count > len(self._free) + len(self._cached):
            return None
        if (short := count - len(self._free)) > 0:
            self._evict(short)
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._refs[block_id] = 1
        self.counters.allocated += count
        self.counters.allocated_new += count
        return taken

    def _evict(self, count: int) -> None:
        removed: list[bytes] = []
        for _ in range(count):
            block_id, _none = self._cached.popitem(last=False)
            name = self._names[block_id]
            assert name is not None
            del self._block_of[name]
            self._names[block_id] = None
            removed.append(name)
            self._free.append(block_id)
        self._announce_removal(removed)

    def register(
        self,
        block_ids: Sequence[int],
        names: Sequence[bytes],
        parent: bytes | None,
        block_tokens: Sequence[Sequence[int] | None],
    ) -> None:
        """Makes held, full, consecutive blocks findable. One whose contents are already known stays unnamed.

        ``block_tokens``: as events tell of them. None: of that block they tell nothing, nor of any that follows it.
        """
        if not self.enable_reuse:
            return
        run: list[tuple[bytes, Sequence[int]]] = []
        run_parent = parent
        for block_id, name, tokens in zip(block_ids, names, block_tokens, strict=True):
            if name in self._block_of:
                self._announce(run_parent, run)
                run, run_parent = [], name
                continue
            self._block_of[name] = block_id
            self._names[block_id] = name
            if tokens is None or (not run and run_parent in self._untold):
                self._announce(run_parent, run)
                run, run_parent = [], name
                self._untold.add(name)
                continue
            run.append((name, tokens))
        self._announce(run_parent, run)

    def _announce(self, parent: bytes | None, run: list[tuple[bytes, Sequence[int]]]) -> None:
        if run and self._events is not None:
            self._events.stored(parent, run)

    def _announce_removal(self, names: list[bytes]) -> None:
        if self._untold:
            told = [name for name in names if name not in self._untold]
            self._untold.difference_update(names)
            names = told
        if names and self._events is not None:
            self._events.removed(names)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable: nobody shall reuse what is in them. Their holders keep them."""
        removed: list[bytes] = []
        for block_id in block_ids:
            name = self._names[block_id]
            if name is not None:
                del self._block_of[name]
                self._names[block_id] = None
                removed.append(name)
                if block_id in self._cached:
                    del self._cached[block_id]
                    self._free.append(block_id)
        self._announce_removal(removed)

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference each. Later blocks of a sequence become evictable before the ones they follow."""
        for block_id in reversed(block_ids):
            refs = self._refs[block_id] - 1
            if refs < 0:
                raise AssertionError(
                    f"block {block_id} was released with {refs + 1} references held; expected at least 1"
                )
            self._refs[block_id] = refs
            if refs == 0:
                if self._names[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises AssertionError, arithmetic spelled out, unless every invariant holds.

        ``holders``: the block lists of everyone who holds references; with them every count is checked exactly.
        """
        held = sum(refs > 0 for refs in self._refs)
        free, cached = len(self._free), len(self._cached)
        _require(
            free + held + cached == self.num_blocks,
            f"{free} free + {held} held + {cached} cached = {free + held + cached}, expected {self.num_blocks}",
        )
        _require(len(set(self._free)) == free, f"{free - len(set(self._free))} blocks are on the free stack twice")
        for block_id in self._free:
            _require(
                self._refs[block_id] == 0 and self._names[block_id] is None,
                f"free block {block_id} has {self._refs[block_id]} references and name {self._names[block_id]!r}",
            )
        for block_id in self._cached:
            _require(
                self._refs[block_id] == 0 and self._names[block_id] is not None,
                f"cached block {block_id} has {self._refs[block_id]} references and name {self._names[block_id]!r}",
            )
        named = {name: block_id for block_id, name in enumerate(self._names) if name is not None}
        _require(
            named == self._block_of,
            f"{len(named)} blocks carry a name, {len(self._block_of)} names lead to a block; expected the same pairs",
        )
        _require(
            self._untold <= named.keys(), f"{len(self._untold - named.keys())} names that no event told of are nobody's"
        )
        if holders is not None:
            counted = Counter(block_id for holder in holders for block_id in holder)
            wrong = {b: (self._refs[b], counted[b]) for b in range(self.num_blocks) if self._refs[b] != counted[b]}
            _require(not wrong, f"blocks whose references differ from their holders, as (counted, held): {wrong}")


def _require(holds: bool, arithmetic: str) -> None:
    if not holds:
        raise AssertionError(f"block pool: {arithmetic}")

"""The paged KV pool's bookkeeping: the state, the references and the content name of every block. No tensors.

A block is in exactly one of three states:

    free    refs == 0, no name      in the free stack
    held    refs  > 0               by sequences or leases; has a name once it is full and findable
    cached  refs == 0, has a name   in order of eviction; a prefix hit takes it, ``allocate`` may evict it

``free + held + cached == num_blocks`` after every call. Cached blocks are evicted by retention priority and then by
last use. A tier below may keep the contents of evicted blocks: see :mod:`trtx.torch_engine.core.host_tier`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trtx.torch_engine.core.eviction_order import EvictionOrder
from trtx.torch_engine.core.kv_events import KvEventLog
from trtx.torch_engine.core.lower_tier import LowerTier
from trtx.torch_engine.core.retention import BlockPriorities
from trtx.torch_engine.messages import Retained


@dataclass(slots=True)
class PoolCounters:
    """Totals since the engine started, counted like TensorRT-LLM's ``kvCacheStats``."""

    allocated: int = 0  # blocks handed out, new and reused
    allocated_new: int = 0
    reused: int = 0
    missed: int = 0  # full prompt blocks that were looked up but not found

    def count(self, *, missed: int, loaded: int) -> None:
        """Counts the prefix of an admission. ``loaded``: newly allocated blocks whose contents a lower tier has."""
        self.missed += missed
        self.allocated_new -= loaded
        self.reused += loaded

    @property
    def hit_rate(self) -> float:
        looked_up = self.reused + self.missed
        return self.reused / looked_up if looked_up else 0.0


class BlockPool:
    """Tracks the references to every block. A caller owns one reference for each block that it allocated or took."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        enable_reuse: bool = True,
        events: KvEventLog | None = None,
        order: EvictionOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {tokens_per_block} tokens; expected at least 1 of each")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self.counters = PoolCounters()
        self.below: LowerTier | None = None  # set before the first block is cached
        self.priorities = BlockPriorities(clock)
        self._events = events
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # name -> block, held or cached
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first
        self._cached = order if order is not None else EvictionOrder()
        self._unready = EvictionOrder()  # cached blocks that the tier below has not dealt with; evicted last
        self._unreported: set[bytes] = set()  # names in _block_of that no event has reported

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate`` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_ready(self) -> int:
        """Number of blocks that ``allocate`` hands out before the first block that is not ready."""
        return self.num_available - len(self._unready)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix.

        Adds no references: call ``take`` before any ``allocate``.
        """
        matched: list[int] = []
        if self.enable_reuse:
            for name in names:
                block_id = self._block_of.get(name)
                if block_id is None:
                    break
                matched.append(block_id)
        return matched

    def find(self, name: bytes) -> int | None:
        """Returns the block with this name, held or cached, or None."""
        return self._block_of.get(name)

    @property
    def names(self) -> list[bytes]:
        """Names of all contents that ``find`` finds."""
        return list(self._block_of)

    def name_of(self, block_id: int) -> bytes | None:
        return self._names[block_id]

    def num_evictable(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks count in ``num_available`` now, but not after ``take``."""
        return sum(not self._refs[block_id] for block_id in block_ids)

    def take(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each of the blocks that ``match`` returned."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                self._cached.discard(block_id)
                if self.below is not None:
                    self._unready.discard(block_id)
            self._refs[block_id] += 1
        self.counters.allocated += len(block_ids)
        self.counters.reused += len(block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each of these held blocks."""
        for block_id in block_ids:
            assert self._refs[block_id], f"block {block_id} is not held"
            self._refs[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` blocks with undefined contents and one reference each, or None, which changes nothing."""
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
        for block_id in self.priorities.take_expired():
            self._reorder(block_id)
        evicted: list[tuple[int, bytes]] = []
        for _ in range(count):
            block_id = self._cached.pop()
            name = self._names[block_id]
            assert name is not None
            del self._block_of[name]
            evicted.append((block_id, name))
        if self.below is not None:
            self.below.evicted(evicted)
        for block_id, _name in evicted:
            if self.below is not None:
                self._unready.discard(block_id)
            self._unname(block_id)
            self._free.append(block_id)
        self._announce_removal([name for _, name in evicted])

    def _unname(self, block_id: int) -> None:
        self._names[block_id] = None
        self.priorities.clear(block_id)

    def _cache(self, block_id: int, name: bytes) -> None:
        priority = self.priorities.begin(block_id)
        self._cached.add(block_id, priority)
        if self.below is not None and self.below.stores_ahead:
            self._unready.add(block_id, priority)

    def _reorder(self, block_id: int) -> None:
        """Gives a cached block the place in the order of eviction that its priority has now."""
        for order in (self._cached, self._unready):
            if block_id in order:
                order.discard(block_id)
                order.add(block_id, self.priorities.of(block_id))

    def retain(self, name: bytes, retained: Retained) -> None:
        """Sets the retention of the block with this name, if there is one."""
        block_id = self._block_of.get(name)
        if block_id is None or self.priorities.retained(block_id) == retained:
            return
        self.priorities.set(block_id, retained)
        if block_id in self._cached:
            self.priorities.begin(block_id)
            self._reorder(block_id)

    # --- the tier below ---

    def first_unready(self) -> tuple[int, bytes] | None:
        """Returns the cached block that is evicted first among the blocks that are not ready, and its name."""
        if not len(self._unready):
            return None
        block_id = self._unready.first()
        name = self._names[block_id]
        assert name is not None
        return block_id, name

    def set_ready(self, block_id: int) -> None:
        """Notes that the tier below has dealt with a cached block: the block may be evicted."""
        self._unready.discard(block_id)

    def lost_copy(self, name: bytes) -> None:
        """Notes that the tier below holds a content no longer. If its block was ready, it is the first to deal with."""
        block_id = self._block_of.get(name)
        if block_id is not None and block_id in self._cached and block_id not in self._unready:
            self._unready.add_first(block_id, self.priorities.of(block_id))

    def first_evicted(self) -> int | None:
        """Returns the block that the next eviction takes; None without cached blocks."""
        return self._cached.first() if len(self._cached) else None

    def use(self, block_id: int) -> None:
        """Makes a cached block the one of its priority that was used last."""
        self._reorder(block_id)

    def restore(self, block_ids: Sequence[int], names: Sequence[bytes]) -> None:
        """Names held blocks whose contents came back from the tier below."""
        returned = [name for name in names if name not in self._block_of]
        reported = self._events.returned(returned) if self._events is not None else returned
        self._unreported.update(name for name in returned if name not in reported)
        for block_id, name in zip(block_ids, names, strict=True):
            if name not in self._block_of:
                self._block_of[name] = block_id
                self._names[block_id] = name

    # --- contents ---

    def register(
        self,
        block_ids: Sequence[int],
        names: Sequence[bytes],
        parent: bytes | None,
        block_tokens: Sequence[Sequence[int] | None],
        cache_salt: str | None = None,
    ) -> None:
        """Gives names to consecutive full blocks of a sequence, so that ``match`` finds them.

        A block gets no name if another block has the same contents already. ``parent``: the name of the block before
        the first one, None at the start of a prompt. ``block_tokens``: the tokens of each block for KV events; None
        leaves the block and all its descendants out of the events. ``cache_salt``: the sequence's, for the events too.
        """
        if not self.enable_reuse:
            return
        run: list[tuple[bytes, Sequence[int]]] = []
        run_parent = parent
        for block_id, name, tokens in zip(block_ids, names, block_tokens, strict=True):
            if name in self._block_of:
                self._announce(run_parent, run, cache_salt)
                run, run_parent = [], name
                continue
            self._block_of[name] = block_id
            self._names[block_id] = name
            if tokens is None or (not run and run_parent in self._unreported):
                self._announce(run_parent, run, cache_salt)
                run, run_parent = [], name
                if self._events is None or not self._events.returned([name]):  # else reported before it went below
                    self._unreported.add(name)
                continue
            run.append((name, tokens))
        self._announce(run_parent, run, cache_salt)

    def _announce(self, parent: bytes | None, run: list[tuple[bytes, Sequence[int]]], cache_salt: str | None) -> None:
        if run and self._events is not None:
            self._events.stored(parent, run, cache_salt)

    def _announce_removal(self, names: list[bytes]) -> None:
        if self._unreported:
            reported = [name for name in names if name not in self._unreported]
            self._unreported.difference_update(names)
            names = reported
        if names and self._events is not None:
            self._events.removed(names)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Removes the names of blocks, so that no later sequence reuses their contents. Current holders keep them."""
        removed: list[bytes] = []
        for block_id in block_ids:
            name = self._names[block_id]
            if name is not None:
                del self._block_of[name]
                self._unname(block_id)
                removed.append(name)
                if block_id in self._cached:
                    self._cached.discard(block_id)
                    self._unready.discard(block_id)
                    self._free.append(block_id)
        if removed and self.below is not None:
            self.below.forget(removed)
        self._announce_removal(removed)

    def forget_all(self) -> None:
        """Empties the prefix cache, as :meth:`forget` does for single blocks."""
        self.forget(range(self.num_blocks))

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference for each block.

        Later blocks of a sequence become evictable before the blocks that they follow.
        """
        for block_id in reversed(block_ids):
            refs = self._refs[block_id] - 1
            if refs < 0:
                raise AssertionError(
                    f"block {block_id} was released with {refs + 1} references held; expected at least 1"
                )
            self._refs[block_id] = refs
            if refs == 0:
                name = self._names[block_id]
                if name is None:
                    self.priorities.clear(block_id)
                    self._free.append(block_id)
                else:
                    self._cache(block_id, name)

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises AssertionError with the numbers in question unless every invariant holds.

        ``holders``: block lists of all owners of references; if given, every reference count is checked exactly.
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
            set(self._unready) <= set(self._cached),
            f"blocks {sorted(set(self._unready) - set(self._cached))} are not ready, and not cached",
        )
        _require(
            self._unreported <= named.keys(),
            f"{len(self._unreported - named.keys())} names without a stored event belong to no block",
        )
        if holders is not None:
            counted = Counter(block_id for holder in holders for block_id in holder)
            wrong = {b: (self._refs[b], counted[b]) for b in range(self.num_blocks) if self._refs[b] != counted[b]}
            _require(not wrong, f"blocks whose references differ from their holders, as (counted, held): {wrong}")


def _require(holds: bool, arithmetic: str) -> None:
    if not holds:
        raise AssertionError(f"block pool: {arithmetic}")

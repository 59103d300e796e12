"""Decides which blocks are copied to host memory and which are copied back, and tracks the copies under way.

A block's content is stored *before* the block is evicted. The aim is that an admission finds all of its blocks free or
already copied. So the tier keeps a reserve: the blocks that are handed out next, a quarter of the device's or as many
as the largest recent prompt took if that is more. It goes through the device's blocks in the order of their eviction.
Blocks without a copy are copied on a separate stream. Cached blocks do not change, so no step has to wait for these
copies. If a block is evicted without a copy, it is copied at that moment. The next step waits, on the device, for
copies of evicted blocks that are still under way. Their number is bounded. If more are evicted, the blocks at the
beginning of a prompt are copied, because the others are useless without them.

The copy in host memory remains after a load, so that the next eviction of the same content costs nothing: it only
counts as a use of the copy. A full tier takes each new content, and evicts contents that prompts needed once before
those that they needed again (:class:`.ReusedLast`). At most half of its blocks are kept in this way. So prompts that
never return displace few that do, and contents that no prompt needs any more leave in the end.

Both tiers find contents by their 256-bit names alone, and a name includes the sequence's ``cache_salt``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from trtx.torch_engine.block_copies import BlockCopies, BlockCopy
from trtx.torch_engine.core.block_pool import BlockPool
from trtx.torch_engine.core.draft_kv import DraftKv
from trtx.torch_engine.core.host_tier.loads import HostLoad
from trtx.torch_engine.core.host_tier.request_counts import AskedNames
from trtx.torch_engine.core.host_tier.reused_last import ReusedLast
from trtx.torch_engine.core.host_tier.tier_counters import TierCounters
from trtx.torch_engine.core.kv_events import KvEventLog
from trtx.torch_engine.core.sequence import Sequence

READY_SHARE, MOST_READY_SHARE = 0.25, 0.75
"""Bounds of the share of the device's blocks that are free or have a copy below, so that an admission drops nothing."""

KEPT_OF_LARGEST = 0.98
"""Decay of the largest admission's size with each further admission: about the last hundred count."""

MOST_STORING = 64
MOST_STORING_BYTES = 256 << 20
"""Blocks, and bytes of each rank, on their way to host memory at once: they bound how long a step can wait for stores.
At 50 GB/s 256 MiB take 5 ms.
"""

STORED_BESIDE_PROMPTS = 0.5
"""Additional blocks that may be on their way at once, for each block that the step fills with prompt tokens. On an H200
the 8B shape computes a block of 32 tokens in 0.9 ms and stores it in 0.1 ms, so these copies end before the step does.
"""

LOAD_TIMEOUT_S = 5.0
"""A load that takes longer is given up, and its sequence recomputes. 16,384 tokens of an 8B model take 0.05 s."""

LOAD_POLL_S = 0.0002
STORE_POLL_S = 0.01
"""Poll intervals of an engine that has nothing else to do."""


@dataclass(slots=True, eq=False)
class _Store:
    names: list[bytes]
    device_ids: list[int]
    host_ids: list[int]
    copy: BlockCopy


@dataclass(slots=True)
class _Leaving:
    """Ends the chain of tiers: nothing is below the host pool, so evicted contents are lost."""

    left: Callable[[list[bytes]], None]
    stores_ahead: bool = False

    def evicted(self, blocks: SequenceOf[tuple[int, bytes]]) -> None:
        self.left([name for _, name in blocks])

    def forget(self, names: Iterable[bytes]) -> None: ...


@dataclass(slots=True)
class _Queued:
    """Stores that :meth:`HostTier.start` will start."""

    names: list[bytes] = field(default_factory=list)
    device_ids: list[int] = field(default_factory=list)
    host_ids: list[int] = field(default_factory=list)


class HostTier:
    """The tier below the device's pool. Methods do not block, except that ``start`` may wait for a peer's read."""

    def __init__(
        self,
        device: BlockPool,
        copies: BlockCopies,
        *,
        min_priority: int | None = None,
        events: KvEventLog | None = None,
        draft_kv: DraftKv | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``min_priority``: blocks of a lower retention priority are not stored.

        ``draft_kv``: of a draft model, whose part of each block is copied too.
        """
        order = ReusedLast(self._is_reused, copies.num_blocks // 2)
        self.pool = BlockPool(copies.num_blocks, device.tokens_per_block, order=order)
        self.pool.below = _Leaving(self._left)
        self.counters = TierCounters()
        self.block_bytes = copies.bytes_of_all_ranks
        self._device = device
        self._copies = copies
        self._min_priority = min_priority
        self._events = events
        self._draft_kv = draft_kv
        self._clock = clock
        self._asked = AskedNames(4 * (copies.num_blocks + device.num_blocks))
        self._most_storing = max(1, min(MOST_STORING, MOST_STORING_BYTES // copies.block_bytes))
        self._largest = 0.0  # blocks that a recent admission took
        self._storing: dict[bytes, int] = {}  # content -> host block, queued or on its way
        self._sources: Counter[int] = Counter()  # device blocks that stores read
        self._queued = _Queued()
        self._stores: deque[_Store] = deque()
        self._loads: list[HostLoad] = []
        self._must_hold = False  # a block that a store reads may be written to by the next step
        device.below = self
        if events is not None:
            events.is_below = self.holds

    # --- what the device's pool tells ---

    stores_ahead = True

    def holds(self, name: bytes) -> bool:
        return name in self._storing or self.pool.find(name) is not None

    def _is_copied(self, block_id: int, name: bytes) -> bool:
        """Whether host memory has, or gets, all of the block's content: with its draft KV, where the block has it."""
        if name in self._storing:
            return True
        host_id = self.pool.find(name)
        if host_id is None:
            return False
        return self._draft_kv is None or not self._draft_kv.copy_lacks(host_id, block_id, name)

    def evicted(self, blocks: SequenceOf[tuple[int, bytes]]) -> None:
        lost: list[tuple[int, bytes]] = []
        for block_id, name in blocks:
            if not self._is_copied(block_id, name):
                lost.append((block_id, name))
            elif (host_id := self.pool.find(name)) is not None:
                self.pool.use(host_id)
        # The first blocks of a sequence are evicted last, and without them its others are worth nothing.
        excess = max(0, len(lost) - max(0, self._most_storing - len(self._storing)))
        for place, (block_id, name) in enumerate(lost):
            if place < excess or not self._store(block_id, name):
                self.counters.dropped += not self.holds(name)
        if any(self._sources[block_id] for block_id, _ in blocks):
            self._must_hold = True

    def forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            if self._storing.pop(name, None) is not None:
                self._must_hold = True  # its block is free now, but a store still reads it
            elif (host_id := self.pool.find(name)) is not None:
                self.pool.forget([host_id])
            else:
                continue
            if self._events is not None:
                self._events.left_host([name])

    def clear(self) -> None:
        """Forgets every content, for example because the weights have changed."""
        self.forget([*self._storing, *self.pool.names])

    def _left(self, names: list[bytes]) -> None:
        """Handles contents that the host pool has evicted."""
        self.counters.evicted += len(names)
        for name in names:
            self._device.lost_copy(name)
        if self._events is not None:
            self._events.left_host([name for name in names if self._device.find(name) is None])

    # --- stores ---

    def _store(self, block_id: int, name: bytes) -> bool:
        """Queues a store, unless the content's priority is too low or copies under way hold all host blocks."""
        if not self._is_worth_it(block_id):
            return False
        if (older := self.pool.find(name)) is not None:  # it lacks draft KV
            if not self.pool.num_evictable([older]):
                return False  # a load reads it
            self.pool.forget([older])
        allocated = self.pool.allocate(1)
        if allocated is None:
            return False  # loads and stores hold every block
        if (retained := self._device.priorities.retained(block_id)) is not None:
            self.pool.priorities.set(allocated[0], retained)
        queued = self._queued
        queued.names.append(name)
        queued.device_ids.append(block_id)
        queued.host_ids += allocated
        self._storing[name] = allocated[0]
        self._sources[block_id] += 1
        return True

    def _is_worth_it(self, block_id: int) -> bool:
        priority = self._device.priorities.of(block_id)
        if self._min_priority is not None and priority < self._min_priority:
            return False
        if self.pool.num_free or (victim_id := self.pool.first_evicted()) is None:
            return True
        return self.pool.priorities.of(victim_id) <= priority

    def _is_reused(self, host_id: int) -> bool:
        """Whether prompts needed the content again after they had computed it."""
        name = self.pool.name_of(host_id)
        return name is not None and self._asked[name] > 1

    def admitted(self, num_blocks: int) -> None:
        """Notes how many blocks of the device one admission took."""
        self._largest = max(float(num_blocks), KEPT_OF_LARGEST * self._largest)

    def _store_ahead(self, prompt_blocks: int) -> None:
        """Queues stores of the blocks that are evicted next. ``prompt_blocks``: those that the step fills."""
        device = self._device
        least, most = (int(device.num_blocks * share) for share in (READY_SHARE, MOST_READY_SHARE))
        wanted = min(max(least, round(self._largest)), most, self.pool.num_blocks // 2)
        most_storing = self._most_storing + int(prompt_blocks * STORED_BESIDE_PROMPTS)
        while device.num_ready < wanted and len(self._storing) < most_storing:
            if (found := device.first_unready()) is None:
                break
            block_id, name = found
            if not self._is_copied(block_id, name):
                self._store(block_id, name)
            device.set_ready(block_id)  # also if its content is rejected

    # --- loads ---

    def ask(self, names: Iterable[bytes]) -> None:
        """Notes that a prompt asked for these contents."""
        self._asked.add(names)

    def is_loading(self, names: Iterable[bytes]) -> bool:
        """Whether one of these contents is on its way to the device."""
        loading = {name for load in self._loads if not load.is_abandoned for name in load.names}
        return bool(loading) and any(name in loading for name in names)

    def reserve(self, names: SequenceOf[bytes]) -> list[int]:
        """Takes a reference to the host block of each content, for :meth:`load`. All contents must be in the tier."""
        host_ids: list[int] = []
        for name in names:
            host_id = self.pool.find(name)
            assert host_id is not None
            host_ids.append(host_id)
        self.pool.take(host_ids)
        self.counters.hits += len(host_ids)
        return host_ids

    def can_load(self, name: bytes) -> bool:
        return self.pool.find(name) is not None

    def load(
        self, sequence: Sequence, names: list[bytes], host_ids: list[int], device_ids: list[int], num_tokens: int
    ) -> None:
        """Queues a load of reserved blocks. It brings the KV of the sequence's first ``num_tokens`` tokens."""
        self._device.share(device_ids)
        self._loads.append(HostLoad(sequence, names, host_ids, device_ids, num_tokens, began=self._clock()))

    # --- both ---

    def start(self, *, before_reads: bool, prompt_tokens: int) -> None:
        """Starts the queued copies. Call it after each schedule, before the step and the reads of peers start.

        ``prompt_tokens``: those that the step computes.
        """
        self._store_ahead(prompt_tokens // self._device.tokens_per_block)
        self._start_stores()
        for load in self._loads:
            if load.copy is None:
                overlaps = any(self._sources[block_id] for block_id in load.device_ids)
                if self._draft_kv is not None:
                    for device_id in load.device_ids:
                        self._draft_kv.loading(device_id)
                load.copy = self._copies.load(load.host_ids, load.device_ids, after_stores=overlaps)
        self._hold()
        if before_reads and self._stores:
            self._copies.wait_for_stores()  # a peer's read may write to a block that a store still reads

    def before_drafts(self) -> None:
        """Starts the queued stores before a draft model writes into blocks that were evicted since the last start."""
        self._start_stores()
        self._hold()

    def _start_stores(self) -> None:
        queued = self._queued
        if queued.names:
            copy = self._copies.store(queued.device_ids, queued.host_ids)
            self._stores.append(_Store(queued.names, queued.device_ids, queued.host_ids, copy))
            if self._draft_kv is not None:
                for name, device_id, host_id in zip(queued.names, queued.device_ids, queued.host_ids, strict=True):
                    self._draft_kv.storing(device_id, host_id, name)
            self._queued = _Queued()

    def _hold(self) -> None:
        if self._must_hold:
            self._copies.hold_steps()
            self._must_hold = False

    def collect(self) -> list[HostLoad]:
        """Processes finished copies. Returns the loads whose sequences can continue or have to recompute.

        Those that have to recompute are marked as abandoned.
        """
        while self._stores and self._stores[0].copy.is_done():
            self._end_store(self._stores.popleft())
        return [load for load in list(self._loads) if self._ends(load)] if self._loads else []

    def _end_store(self, store: _Store) -> None:
        counters = self.counters
        counters.stored += len(store.names)
        counters.stored_seconds += store.copy.seconds
        for name, device_id, host_id in zip(store.names, store.device_ids, store.host_ids, strict=True):
            self._sources[device_id] -= 1
            if not self._sources[device_id]:
                del self._sources[device_id]
            if self._storing.get(name) == host_id:  # else it was forgotten meanwhile
                del self._storing[name]
                self.pool.register([host_id], [name], None, [None])
        self.pool.release(store.host_ids[::-1])

    def _ends(self, load: HostLoad) -> bool:
        """Whether the load's sequence stops waiting now. True exactly once for each load."""
        if load.copy is not None and load.copy.is_done():
            was_abandoned = load.is_abandoned
            self._loads.remove(load)
            self.counters.loaded += len(load.names)
            self.counters.loaded_seconds += load.copy.seconds
            if [self.pool.name_of(host_id) for host_id in load.host_ids] != load.names:
                load.is_abandoned = True  # a content was forgotten meanwhile
                self.counters.abandoned_loads += not was_abandoned
            host_ids = load.host_ids
            if not load.is_abandoned and not load.sequence.is_cancelled:
                self._restore(load)
            self.pool.release(host_ids)
            self._device.release(load.device_ids)
            return not was_abandoned
        if not load.is_abandoned and self._clock() - load.began > LOAD_TIMEOUT_S:
            load.is_abandoned = True
            self.counters.abandoned_loads += 1
            return True
        return False

    def _restore(self, load: HostLoad) -> None:
        self._device.restore(load.device_ids, load.names)
        for name, host_id, device_id in zip(load.names, load.host_ids, load.device_ids, strict=True):
            if self._draft_kv is not None:
                self._draft_kv.loaded(host_id, device_id, name)
            if (retained := self.pool.priorities.retained(host_id)) is not None:
                self._device.retain(name, retained)

    @property
    def wait_s(self) -> float | None:
        """Seconds that an idle engine may sleep; None: no limit."""
        if any(not load.is_abandoned for load in self._loads):
            return LOAD_POLL_S
        return STORE_POLL_S if self._stores or self._loads else None

    @property
    def num_used(self) -> int:
        """Number of host blocks that have a content or are receiving one."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def loading(self) -> list[list[int]]:
        """Device blocks that loads hold references to."""
        return [load.device_ids for load in self._loads]

    def close(self) -> None:
        self._copies.close()

    def check(self) -> None:
        """Raises AssertionError unless the host pool agrees with the copies under way."""
        storing = [host_id for store in self._stores for host_id in store.host_ids] + self._queued.host_ids
        self.pool.check([storing, *(load.host_ids for load in self._loads)])
        sources = Counter(block for store in self._stores for block in store.device_ids)
        sources.update(self._queued.device_ids)
        if sources != self._sources:
            raise AssertionError(f"stores read {dict(sources)}, and {dict(self._sources)} are noted")
        if not set(self._storing.values()) <= set(storing):
            raise AssertionError(f"contents on their way to {self._storing}, and stores to {storing}")
        for name in self._storing:
            if self.pool.find(name) is not None:
                raise AssertionError(f"content {name.hex()} is on its way to host memory, and there already")

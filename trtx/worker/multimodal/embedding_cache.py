"""LRU cache of embeddings by image content, bounded in bytes. Open requests pin the embeddings that they use.

Each miss is computed once, by a task of the cache, however many requests ask for it in the meantime. If the first
requester disconnects, the others still get the embedding. Bytes are reserved before anything is computed, for all
misses of a request at once and in order of arrival, so no request holds some bytes while it waits for more. An
embedding that turns out larger than its reservation is kept; unpinned embeddings are evicted to make room for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class TooLarge(ValueError):
    """One request needs more bytes at once than the cache may hold."""


class NotMade(Exception):
    """The embedding of ``key`` could not be made. Each waiting request gets its own instance of this exception.

    ``error`` is the exception that ``make`` raised. All waiting requests share it, so it is never raised itself: an
    exception object has only one traceback.
    """

    def __init__(self, key: bytes, error: BaseException) -> None:
        super().__init__(str(error))
        self.key, self.error = key, error


@dataclass(frozen=True, slots=True)
class EmbeddingRequest(Generic[T]):
    """A request for one image's embedding. ``make`` returns the embedding and its size in bytes.

    ``reserved_bytes`` are reserved for it until it is made.
    """

    key: bytes
    reserved_bytes: int
    make: Callable[[], Awaitable[tuple[T, int]]]


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    bytes: int  # the reservation; once made, the actual size
    made: asyncio.Future[T]
    pins: int = 0  # number of leases that pin it
    is_ready: bool = False


@dataclass(slots=True)
class CacheStats:
    """Lookups since the start, by outcome. A request that contains an image twice counts as one lookup."""

    hits: int = 0  # in the cache
    joined: int = 0  # in the making for another request
    misses: int = 0  # made for this request
    evictions: int = 0


class EmbeddingLease(Generic[T]):
    """The embeddings that one request pins until :meth:`release`."""

    def __init__(self, entries: Mapping[bytes, _Entry[T]], released: Callable[[], None]) -> None:
        self._entries = entries  # entries instead of keys: after a failure, the same key may get another entry
        self._released = released
        self._is_held = True

    async def embeddings(self) -> Mapping[bytes, T]:
        """Waits until all embeddings of the lease are made and returns them.

        Raises NotMade for the first that failed.
        """
        assert self._is_held, "it was released"
        for key, entry in self._entries.items():
            await asyncio.wait([entry.made])  # asyncio.wait does not cancel the future, which other requests share
            if error := entry.made.exception():
                raise NotMade(key, error) from error
        return {key: entry.made.result() for key, entry in self._entries.items()}

    def release(self) -> None:
        """Unpins the embeddings. Idempotent."""
        if self._is_held:
            self._is_held = False
            for entry in self._entries.values():
                entry.pins -= 1
            self._released()


@dataclass(eq=False, slots=True)
class EmbeddingCache(Generic[T]):
    """A cache for use on one event loop. ``discard`` is called with each embedding that leaves the cache."""

    capacity_bytes: int
    discard: Callable[[bytes, T], None]
    stats: CacheStats = field(default_factory=CacheStats)
    used_bytes: int = 0
    _entries: OrderedDict[bytes, _Entry[T]] = field(default_factory=OrderedDict)  # least recently used first
    _queue: deque[asyncio.Event] = field(default_factory=deque)  # requests that wait for room, in order of arrival
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def lease(self, wanted: Sequence[EmbeddingRequest[T]]) -> EmbeddingLease[T]:
        """Pins all of ``wanted``, after waiting until there is room for the misses. Raises TooLarge."""
        distinct = {one.key: one for one in wanted}
        needed = sum(one.reserved_bytes for one in distinct.values())
        if needed > self.capacity_bytes:
            raise TooLarge(f"{needed} bytes of embeddings at once, and at most {self.capacity_bytes} are held")
        turn = asyncio.Event()
        self._queue.append(turn)
        try:
            while self._queue[0] is not turn or not self._has_room(distinct):
                turn.clear()
                await turn.wait()
            return EmbeddingLease(self._pin(distinct.values()), self._released)
        finally:
            self._queue.remove(turn)
            self._wake()

    def held(self, key: bytes) -> T | None:
        """The embedding if it is in the cache now. Neither pins it nor counts a lookup."""
        entry = self._entries.get(key)
        return entry.made.result() if entry is not None and entry.is_ready else None

    def clear(self) -> None:
        """Evicts everything that is not pinned."""
        self._evict(self.used_bytes, keep=())

    async def close(self) -> None:
        """Cancels the embeddings in the making and discards all others. Leases of a closed cache are invalid."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key, entry in self._entries.items():
            self.discard(key, entry.made.result())  # pinned or not; entries in the making have left with their task
        self._entries.clear()
        self.used_bytes = 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of embeddings that a request uses or that are being made."""
        return sum(entry.bytes for entry in self._entries.values() if entry.pins or not entry.is_ready)

    def __len__(self) -> int:
        """Number of embeddings that are ready."""
        return sum(entry.is_ready for entry in self._entries.values())

    def check(self) -> None:
        """Raises AssertionError if the cache's accounting is inconsistent."""
        assert self.used_bytes == sum(entry.bytes for entry in self._entries.values())
        evictable = [entry for entry in self._entries.values() if entry.is_ready and not entry.pins]
        assert 0 <= self.used_bytes <= self.capacity_bytes or not evictable
        assert all(entry.pins >= 0 and entry.bytes >= 0 for entry in self._entries.values())
        assert all(entry.is_ready == entry.made.done() for entry in self._entries.values())

    def _has_room(self, wanted: Mapping[bytes, EmbeddingRequest[T]]) -> bool:
        missing = sum(one.reserved_bytes for key, one in wanted.items() if key not in self._entries)
        kept = sum(
            entry.bytes for key, entry in self._entries.items() if entry.pins or not entry.is_ready or key in wanted
        )
        return kept + missing <= self.capacity_bytes

    def _pin(self, wanted: Collection[EmbeddingRequest[T]]) -> dict[bytes, _Entry[T]]:
        pinned: dict[bytes, _Entry[T]] = {}
        missing = [one for one in wanted if one.key not in self._entries]
        room = self.capacity_bytes - sum(one.reserved_bytes for one in missing)
        self._evict(self.used_bytes - room, keep={one.key for one in wanted})
        for one in wanted:
            entry = self._entries.get(one.key)
            if entry is None:
                self.stats.misses += 1
                entry = self._begin(one)
            elif entry.is_ready:
                self.stats.hits += 1
            else:
                self.stats.joined += 1
            entry.pins += 1
            self._entries.move_to_end(one.key)
            pinned[one.key] = entry
        return pinned

    def _begin(self, wanted: EmbeddingRequest[T]) -> _Entry[T]:
        entry = _Entry(wanted.reserved_bytes, asyncio.get_running_loop().create_future())
        # If all requesters have gone by the time it fails, its exception is never read. Reading it here avoids
        # asyncio's warning.
        entry.made.add_done_callback(lambda made: made.cancelled() or made.exception())
        self._entries[wanted.key] = entry
        self.used_bytes += entry.bytes
        task = asyncio.create_task(self._make(wanted, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return entry

    async def _make(self, wanted: EmbeddingRequest[T], entry: _Entry[T]) -> None:
        try:
            embedding, size = await wanted.make()
        except BaseException as error:
            del self._entries[wanted.key]
            self.used_bytes -= entry.bytes
            if isinstance(error, asyncio.CancelledError):
                entry.made.cancel()
            else:
                entry.made.set_exception(error)
            self._wake()
            if not isinstance(error, Exception):
                raise
            return
        self.used_bytes += size - entry.bytes
        entry.bytes, entry.is_ready = size, True
        entry.made.set_result(embedding)
        self._evict(self.used_bytes - self.capacity_bytes, keep=())
        self._wake()

    def _released(self) -> None:
        self._evict(self.used_bytes - self.capacity_bytes, keep=())
        self._wake()

    def _wake(self) -> None:
        """Wakes the head of the queue only; when it has finished, it wakes the next."""
        if self._queue:
            self._queue[0].set()

    def _evict(self, size: int, keep: Collection[bytes]) -> None:
        """Evicts unpinned embeddings that are not in ``keep`` until ``size`` bytes are freed or none is left."""
        for key in [key for key, entry in self._entries.items() if entry.is_ready and not entry.pins]:
            if size <= 0:
                return
            if key in keep:
                continue
            entry = self._entries.pop(key)
            self.used_bytes -= entry.bytes
            size -= entry.bytes
            self.stats.evictions += 1
            self.discard(key, entry.made.result())

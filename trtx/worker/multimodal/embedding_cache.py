"""Embeddings by the content of their pictures: an LRU bounded by bytes, of which open requests pin what they use.

A miss is made once however many ask for it meanwhile, by a task of the cache's own: whoever asked first may go, and
those who joined get their embedding all the same. Bytes are reserved before anything is made, for all misses of a
request at once and in the order of arrival, so nobody holds some and waits for more. An embedding that turns out larger
than what was reserved for it is held all the same, and all that nobody has pinned goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class TooLarge(ValueError):
    """What one request wants at once is more than the cache may hold."""


class NotMade(Exception):
    """What one of those who asked for an embedding is told, an exception of its own. ``error`` is what ``make`` raised,
    which all of them share and nobody else raises: an exception has one traceback."""

    def __init__(self, key: bytes, error: BaseException) -> None:
        super().__init__(str(error))
        self.key, self.error = key, error


@dataclass(frozen=True, slots=True)
class Wanted(Generic[T]):
    """One picture's embedding. ``reserved_bytes`` are kept for it until it is made. ``make`` gives it and its bytes."""

    key: bytes
    reserved_bytes: int
    make: Callable[[], Awaitable[tuple[T, int]]]


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    bytes: int  # reserved, and once it is made its own
    made: asyncio.Future[T]
    pins: int = 0  # by leases
    is_ready: bool = False


@dataclass(slots=True)
class CacheStats:
    """Since the start. A request that wants one picture twice asks once."""

    hits: int = 0  # there when it was asked for
    joined: int = 0  # being made for another request
    misses: int = 0  # made for the request itself
    evictions: int = 0


class Lease(Generic[T]):
    """What one request pins, until it is released."""

    def __init__(self, entries: Mapping[bytes, _Entry[T]], released: Callable[[], None]) -> None:
        self._entries = entries  # not keys: one that failed is another entry by the time it is asked for again
        self._released = released
        self._is_held = True

    async def embeddings(self) -> Mapping[bytes, T]:
        """Each of the lease's, once all are made. Raises NotMade for one that could not be."""
        assert self._is_held, "it was released"
        for key, entry in self._entries.items():
            await asyncio.wait([entry.made])  # who waits may be cancelled, what is made is everybody's
            if error := entry.made.exception():
                raise NotMade(key, error) from error
        return {key: entry.made.result() for key, entry in self._entries.items()}

    def release(self) -> None:
        """Idempotent."""
        if self._is_held:
            self._is_held = False
            for entry in self._entries.values():
                entry.pins -= 1
            self._released()


@dataclass(eq=False, slots=True)
class EmbeddingCache(Generic[T]):
    """One loop's. ``discard`` is called with each embedding that leaves, when nobody has it pinned."""

    capacity_bytes: int
    discard: Callable[[bytes, T], None]
    stats: CacheStats = field(default_factory=CacheStats)
    used_bytes: int = 0
    _entries: OrderedDict[bytes, _Entry[T]] = field(default_factory=OrderedDict)  # least recently asked for first
    _queue: deque[asyncio.Event] = field(default_factory=deque)  # who waits for room, in the order of arrival
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def lease(self, wanted: Sequence[Wanted[T]]) -> Lease[T]:
        """Pins all of ``wanted``, waiting until there is room for what has to be made. Raises TooLarge."""
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
            return Lease(self._pin(distinct.values()), self._released)
        finally:
            self._queue.remove(turn)
            self._wake()

    def held(self, key: bytes) -> T | None:
        """The embedding where it is there now. Nothing is pinned, and nothing counted as asked for."""
        entry = self._entries.get(key)
        return entry.made.result() if entry is not None and entry.is_ready else None

    def clear(self) -> None:
        """Forgets what nobody has pinned."""
        self._evict(self.used_bytes, keep=())

    async def close(self) -> None:
        """Gives up what is being made, and forgets everything. Leases of a closed cache are worth nothing."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key, entry in self._entries.items():
            self.discard(key, entry.made.result())  # pinned or not; what was under way has left with its task
        self._entries.clear()
        self.used_bytes = 0

    @property
    def pinned_bytes(self) -> int:
        """Of embeddings that a request uses, or that are being made."""
        return sum(entry.bytes for entry in self._entries.values() if entry.pins or not entry.is_ready)

    def __len__(self) -> int:
        """Embeddings that are there."""
        return sum(entry.is_ready for entry in self._entries.values())

    def check(self) -> None:
        """Raises AssertionError where the books are wrong."""
        assert self.used_bytes == sum(entry.bytes for entry in self._entries.values())
        evictable = [entry for entry in self._entries.values() if entry.is_ready and not entry.pins]
        assert 0 <= self.used_bytes <= self.capacity_bytes or not evictable
        assert all(entry.pins >= 0 and entry.bytes >= 0 for entry in self._entries.values())
        assert all(entry.is_ready == entry.made.done() for entry in self._entries.values())

    def _has_room(self, wanted: Mapping[bytes, Wanted[T]]) -> bool:
        missing = sum(one.reserved_bytes for key, one in wanted.items() if key not in self._entries)
        kept = sum(
            entry.bytes for key, entry in self._entries.items() if entry.pins or not entry.is_ready or key in wanted
        )
        return kept + missing <= self.capacity_bytes

    def _pin(self, wanted: Collection[Wanted[T]]) -> dict[bytes, _Entry[T]]:
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

    def _begin(self, wanted: Wanted[T]) -> _Entry[T]:
        entry = _Entry(wanted.reserved_bytes, asyncio.get_running_loop().create_future())
        # Whoever asked may have gone by the time it fails: nobody reads it then, and that is no error of the loop's.
        entry.made.add_done_callback(lambda made: made.cancelled() or made.exception())
        self._entries[wanted.key] = entry
        self.used_bytes += entry.bytes
        task = asyncio.create_task(self._make(wanted, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return entry

    async def _make(self, wanted: Wanted[T], entry: _Entry[T]) -> None:
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
        """Only the head of the queue may go on: what it does may let the next one."""
        if self._queue:
            self._queue[0].set()

    def _evict(self, size: int, keep: Collection[bytes]) -> None:
        """Until ``size`` bytes are free that were not, or nothing is left that may go."""
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

"""The embedding cache: bounded by bytes, every miss made once, and nobody harmed by whoever goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.worker.multimodal.embedding_cache import EmbeddingCache, EmbeddingLease, EmbeddingRequest, NotMade, TooLarge


class Encoder:
    """Makes embeddings when it is told to; ``sizes``: bytes of each key's."""

    def __init__(self, sizes: dict[bytes, int]) -> None:
        self.sizes = sizes
        self.asked: list[bytes] = []
        self.open: dict[bytes, asyncio.Future[str]] = {}
        self.there: set[bytes] = set()  # made, and not discarded

    def wanted(self, key: bytes, reserved: int | None = None) -> EmbeddingRequest[str]:
        return EmbeddingRequest(key, self.sizes[key] if reserved is None else reserved, self._maker(key))

    def _maker(self, key: bytes) -> Callable[[], Awaitable[tuple[str, int]]]:
        async def make() -> tuple[str, int]:
            self.asked.append(key)
            assert key not in self.open, "made twice at a time"
            self.open[key] = asyncio.get_running_loop().create_future()
            try:
                text = await self.open[key]
            finally:
                del self.open[key]
            assert key not in self.there, "made although it is there"
            self.there.add(key)
            return text, self.sizes[key]

        return make

    def discard(self, key: bytes, text: str) -> None:
        assert text == text_of(key)
        self.there.remove(key)

    def finish(self, key: bytes, error: Exception | None = None) -> None:
        if error is None:
            self.open[key].set_result(text_of(key))
        else:
            self.open[key].set_exception(error)


def text_of(key: bytes) -> str:
    return f"embedding of {key.decode()}"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def turns(count: int = 20) -> None:
    """Everything that can go on without anybody from outside has gone on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_miss_is_made_once_and_a_cancelled_first_caller_harms_nobody() -> None:
    encoder = Encoder({b"a": 4})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)

    async def ask() -> str:
        lease = await cache.lease([encoder.wanted(b"a")])
        try:
            return (await lease.embeddings())[b"a"]
        finally:
            lease.release()

    first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
    await turns()
    first.cancel()
    await turns()
    encoder.finish(b"a")
    assert await second == text_of(b"a")
    assert await ask() == text_of(b"a")
    assert encoder.asked == [b"a"]
    assert (cache.stats.misses, cache.stats.joined, cache.stats.hits) == (1, 1, 1)
    assert cache.pinned_bytes == 0
    cache.check()


async def test_of_a_partial_hit_only_the_missing_is_made() -> None:
    encoder = Encoder({b"a": 4, b"b": 4})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    lease = await cache.lease([encoder.wanted(b"a")])
    await turns()
    encoder.finish(b"a")
    await lease.embeddings()
    both = await cache.lease([encoder.wanted(key) for key in (b"b", b"a", b"b")])
    await turns()
    assert [*encoder.open] == [b"b"]
    encoder.finish(b"b")
    assert await both.embeddings() == {b"a": text_of(b"a"), b"b": text_of(b"b")}
    assert encoder.asked == [b"a", b"b"]
    for _ in range(2):
        both.release()
    assert cache.pinned_bytes == 4, "the first lease's, which nobody released"
    cache.check()


async def test_what_is_pinned_stays_and_whoever_needs_its_room_waits_for_it() -> None:
    encoder = Encoder({b"a": 6, b"b": 6, b"c": 1})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    first = await cache.lease([encoder.wanted(b"a")])
    await turns()
    encoder.finish(b"a")
    await first.embeddings()
    waiting = asyncio.create_task(cache.lease([encoder.wanted(b"b")]))
    behind = asyncio.create_task(cache.lease([encoder.wanted(b"c")]))  # would fit, and does not overtake
    await turns()
    assert not waiting.done() and not behind.done() and encoder.there == {b"a"}
    first.release()
    await turns()
    assert waiting.done() and behind.done() and encoder.there == set()
    assert {*encoder.open} == {b"b", b"c"}
    cache.check()


async def test_whoever_gives_up_waiting_lets_the_next_one_pass() -> None:
    encoder = Encoder({b"a": 6, b"b": 6, b"c": 1})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    await cache.lease([encoder.wanted(b"a")])
    waiting = asyncio.create_task(cache.lease([encoder.wanted(b"b")]))
    behind = asyncio.create_task(cache.lease([encoder.wanted(b"c")]))
    await turns()
    waiting.cancel()
    await turns()
    assert behind.done()
    cache.check()


async def test_the_least_recently_asked_for_goes_first() -> None:
    encoder = Encoder(dict.fromkeys((b"a", b"b", b"c"), 4))
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    for key in (b"a", b"b", b"a", b"c"):
        lease = await cache.lease([encoder.wanted(key)])
        await turns()
        if key in encoder.open:
            encoder.finish(key)
        await lease.embeddings()
        lease.release()
    assert encoder.there == {b"a", b"c"}
    assert cache.stats.evictions == 1
    cache.clear()
    assert encoder.there == set() and cache.used_bytes == 0


async def test_an_embedding_that_can_not_be_made_is_told_to_all_who_wait_and_made_anew_for_the_next() -> None:
    encoder = Encoder({b"a": 4})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    leases = [await cache.lease([encoder.wanted(b"a")]) for _ in range(2)]
    await turns()
    encoder.finish(b"a", RuntimeError("no encoder"))
    told = []
    for lease in leases:
        with pytest.raises(NotMade, match="no encoder") as failed:
            await lease.embeddings()
        told.append(failed.value)
    assert told[0] is not told[1] and told[0].error is told[1].error, "each raises an exception of its own"
    assert [(one.key, type(one.error)) for one in told] == [(b"a", RuntimeError)] * 2
    again = await cache.lease([encoder.wanted(b"a")])
    for lease in leases:
        lease.release()  # of the entry that failed, not of the new one
    assert cache.pinned_bytes == 4
    await turns()
    encoder.finish(b"a")
    assert await again.embeddings() == {b"a": text_of(b"a")}
    cache.check()


async def test_more_than_is_held_at_once_is_refused_at_once() -> None:
    encoder = Encoder({b"a": 6, b"b": 6})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    with pytest.raises(TooLarge, match="12 bytes of embeddings at once, and at most 10"):
        await cache.lease([encoder.wanted(b"a"), encoder.wanted(b"b")])
    assert len(cache) == cache.used_bytes == 0


async def test_bytes_that_were_reserved_and_not_needed_are_others() -> None:
    encoder = Encoder({b"a": 2, b"b": 8})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    await cache.lease([encoder.wanted(b"a", reserved=10)])
    waiting = asyncio.create_task(cache.lease([encoder.wanted(b"b")]))
    await turns()
    assert not waiting.done()
    encoder.finish(b"a")
    await turns()
    assert waiting.done()
    cache.check()


async def test_one_that_is_larger_than_expected_is_held_and_what_nobody_uses_goes_for_it() -> None:
    encoder = Encoder({b"a": 4, b"b": 9, b"c": 3})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    unused = await cache.lease([encoder.wanted(b"a")])
    await turns()
    encoder.finish(b"a")
    await turns()
    unused.release()
    lease = await cache.lease([encoder.wanted(b"b", reserved=2), encoder.wanted(b"c")])
    await turns()
    assert encoder.there == {b"a"}
    encoder.finish(b"b")
    encoder.finish(b"c")
    assert await lease.embeddings() == {key: text_of(key) for key in (b"b", b"c")}
    assert encoder.there == {b"b", b"c"} and cache.used_bytes == 12
    cache.check()
    lease.release()
    assert cache.used_bytes <= 10
    cache.check()


async def test_the_end_gives_up_what_is_being_made_and_discards_what_is_there() -> None:
    encoder = Encoder({b"a": 4, b"b": 4})
    cache: EmbeddingCache[str] = EmbeddingCache(10, encoder.discard)
    await cache.lease([encoder.wanted(b"a")])
    await turns()
    encoder.finish(b"a")
    await turns()
    lease = await cache.lease([encoder.wanted(b"b")])
    await turns()
    await cache.close()
    assert encoder.there == set() and cache.used_bytes == len(cache) == 0
    with pytest.raises(asyncio.CancelledError):
        await lease.embeddings()


KEYS = [bytes([letter]) for letter in b"abcdef"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "finish", "finish", "fail", "release", "cancel"]),
        st.integers(0, 5),
        st.sets(st.sampled_from(KEYS), min_size=1, max_size=3),
    ),
    max_size=40,
)


@settings(max_examples=examples(150), derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=6, max_size=6), slack=st.integers(-3, 3), actions=ACTIONS)
async def test_whatever_is_asked_made_failed_released_and_cancelled_the_books_are_right(
    sizes: list[int], slack: int, actions: list[tuple[str, int, set[bytes]]]
) -> None:
    encoder = Encoder(dict(zip(KEYS, sizes, strict=True)))
    cache: EmbeddingCache[str] = EmbeddingCache(16, encoder.discard)
    asked: list[asyncio.Task[Any]] = []
    held: list[EmbeddingLease[str]] = []
    for action, number, keys in actions:
        if action == "ask":
            wanted = [encoder.wanted(key, max(0, min(5, encoder.sizes[key] + slack))) for key in sorted(keys)]
            asked.append(asyncio.create_task(cache.lease(wanted)))
        elif action in ("finish", "fail") and encoder.open:
            key = [*encoder.open][number % len(encoder.open)]
            encoder.finish(key, OSError("lost") if action == "fail" else None)
        elif action == "release" and held:
            held.pop(number % len(held)).release()
        elif action == "cancel" and asked:
            asked.pop(number % len(asked)).cancel()
        await turns()
        for task in [one for one in asked if one.done()]:
            asked.remove(task)
            held.append(task.result())
        cache.check()
        assert slack < 0 or cache.used_bytes <= cache.capacity_bytes
    # All can be served in the end: nobody waits for ever, and nothing stays pinned.
    for _ in range(200):
        if not asked and not held and not encoder.open:
            break
        for key in [*encoder.open]:
            encoder.finish(key)
        await turns()
        for task in [one for one in asked if one.done()]:
            asked.remove(task)
            held.append(task.result())
        while held:
            held.pop().release()
        await turns()
    assert not asked and not encoder.open
    assert cache.pinned_bytes == 0
    cache.check()
    await cache.close()
    assert encoder.there == set()

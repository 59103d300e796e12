"""TensorRT-LLM's KV events become calls of Dynamo's publisher that a router can trust."""

from __future__ import annotations

import json
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from trtx.worker.kv_events import KvEventPublication
from trtx.worker.polling import load_snapshot


class Recorder:
    """Stands where Dynamo's KvEventPublisher is: it needs a runtime, and keeps nothing that could be read back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def publish_stored(self, token_ids: list[int], num_block_tokens: list[int], hashes: list[int], **more: Any) -> None:
        assert sum(num_block_tokens) == len(token_ids)
        self.calls.append(("stored", (token_ids, hashes, more["parent_hash"], more["cache_salt"])))

    def publish_removed(self, hashes: list[int]) -> None:
        self.calls.append(("removed", hashes))


def block(block_hash: int, *token_ids: int, **more: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token_id, "token_extra_id": 0} for token_id in token_ids]
    return {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": 0} | more


def event(event_id: int, kind: str, window: int = 64, **data: Any) -> dict[str, Any]:
    return {"event_id": event_id, "window_size": window, "data": {"type": kind, **data}}


def published(*events: dict[str, Any]) -> tuple[list[tuple[str, Any]], KvEventPublication]:
    recorder = Recorder()
    publication = KvEventPublication(recorder, block_size=2)
    publication.publish([event(0, "created", num_blocks_per_cache_level=[8, 0]), *events])
    return recorder.calls, publication


def test_consecutive_blocks_are_published_as_one_chain_with_signed_hashes() -> None:
    calls, _ = published(
        event(1, "stored", parent_hash=None, blocks=[block(2**64 - 1, 5, 6)]),
        event(2, "stored", parent_hash=2**64 - 1, blocks=[block(7, 1, 2), block(2**63, 3, 4)]),
    )
    assert calls[1] == ("stored", ([1, 2, 3, 4], [7, -(2**63)], -1, None))


def test_a_block_that_is_not_full_is_neither_published_nor_removed() -> None:
    calls, _ = published(
        event(1, "stored", parent_hash=None, blocks=[block(7, 1, 2), block(8, 3)]),
        event(2, "removed", block_hashes=[8]),
        event(3, "removed", block_hashes=[7]),
    )
    assert [kind for kind, _ in calls] == ["stored", "removed"]
    assert calls[1] == ("removed", [7])


def test_a_block_with_a_picture_is_not_published_nor_what_follows_it() -> None:
    """Equal placeholders behind two pictures would be one prompt to the router."""
    keys = [{"type": "mm_key", "hash": "ab" * 32, "start_offset": 0}]
    calls, _ = published(
        event(1, "stored", parent_hash=None, blocks=[block(7, 1, 2), block(8, 9, 9, mm_keys=keys), block(6, 3, 4)]),
        event(2, "stored", parent_hash=6, blocks=[block(5, 5, 5)]),
    )
    assert calls == [("stored", ([1, 2], [7], None, None))]


def test_a_cache_salt_travels_with_its_blocks() -> None:
    calls, _ = published(event(1, "stored", parent_hash=None, blocks=[block(7, 1, 2, cache_salt="tenant")]))
    assert calls[0][1][3] == "tenant"


def test_events_of_a_smaller_window_are_left_out() -> None:
    calls, _ = published(event(1, "stored", window=16, parent_hash=None, blocks=[block(7, 1, 2)]))
    assert calls == []


def test_a_window_that_is_not_the_widest_is_left_out_even_where_it_is_announced_first() -> None:
    recorder = Recorder()
    publication = KvEventPublication(recorder, block_size=2)
    publication.publish(
        [
            event(0, "created", window=16, num_blocks_per_cache_level=[8, 0]),
            event(1, "created", window=64, num_blocks_per_cache_level=[8, 0]),
            event(2, "stored", window=16, parent_hash=None, blocks=[block(8, 1, 2)]),
            event(3, "stored", window=64, parent_hash=None, blocks=[block(7, 1, 2)]),
            event(4, "removed", window=16, block_hashes=[8]),
        ]
    )
    assert recorder.calls == [("stored", ([1, 2], [7], None, None))]


def test_a_gap_in_the_event_ids_makes_the_router_forget_and_learn_anew() -> None:
    calls, publication = published(
        event(1, "stored", parent_hash=None, blocks=[block(7, 1, 2), block(8, 3, 4)]),
        event(4, "stored", parent_hash=7, blocks=[block(9, 5, 6)]),  # can't be attached: the router has no 7 any more
        event(5, "removed", block_hashes=[8]),  # nothing that it knows
        event(6, "stored", parent_hash=None, blocks=[block(7, 1, 2)]),
    )
    assert publication.lost_events == 2
    assert calls[1:] == [("removed", [8, 7]), ("stored", ([1, 2], [7], None, None))]


class Index:
    """Dynamo's own index of a router, behind the publisher's calls. It raises for a block that it does not know."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._events = 0

    def _apply(self, data: dict[str, Any]) -> None:
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        self._events += 1
        self._tree.apply_event(0, json.dumps(event).encode())

    def publish_stored(self, token_ids: list[int], num_block_tokens: list[int], hashes: list[int], **more: Any) -> None:
        keys = compute_block_hash_for_seq(token_ids, num_block_tokens[0])
        blocks = [{"block_hash": one, "tokens_hash": key} for one, key in zip(hashes, keys, strict=True)]
        self._apply({"stored": {"parent_hash": more["parent_hash"], "blocks": blocks}})

    def publish_removed(self, hashes: list[int]) -> None:
        self._apply({"removed": {"block_hashes": hashes}})

    def cached(self, *token_ids: int) -> int:
        """The number of blocks of a prompt that the router expects in this worker's cache."""
        scores = self._tree.find_matches(compute_block_hash_for_seq(list(token_ids), 2)).scores
        return max(scores.values(), default=0)


def test_blocks_below_one_that_left_and_returned_are_known_to_the_router_again() -> None:
    """As with a host tier: blocks 8 to 10 stay in host memory while 7, which begins their prompts, is gone."""
    index = Index()
    publication = KvEventPublication(index, block_size=2)
    publication.publish(
        [
            event(0, "created", num_blocks_per_cache_level=[8, 8]),
            event(1, "stored", parent_hash=None, blocks=[block(7, 1, 2), block(8, 3, 4), block(9, 5, 6)]),
            event(2, "stored", parent_hash=7, blocks=[block(10, 7, 8)]),
        ]
    )
    assert (index.cached(1, 2, 3, 4, 5, 6), index.cached(1, 2, 7, 8)) == (3, 2)
    publication.publish([event(3, "removed", block_hashes=[7])])
    assert index.cached(1, 2, 3, 4) == 0
    publication.publish(
        [event(4, "removed", block_hashes=[9]), event(5, "stored", parent_hash=8, blocks=[block(9, 5, 6)])]
    )
    publication.publish([event(6, "stored", parent_hash=None, blocks=[block(7, 1, 2)])])
    assert (index.cached(1, 2, 3, 4, 5, 6), index.cached(1, 2, 7, 8)) == (3, 2)
    publication.publish([event(7, "removed", block_hashes=[7, 8, 9, 10])])
    assert index.cached(1, 2) == 0
    publication.publish([event(8, "stored", parent_hash=None, blocks=[block(7, 1, 2)])])
    assert index.cached(1, 2, 3, 4) == 1


def test_hashes_in_hex_are_as_good_as_numbers() -> None:
    calls, _ = published(
        event(1, "stored", parent_hash=None, blocks=[block("ff" * 32, 1, 2)]),  # type: ignore[arg-type]
        event(2, "removed", block_hashes=["ff" * 32]),
    )
    assert calls == [("stored", ([1, 2], [-1], None, None)), ("removed", [-1])]


def test_the_load_snapshot_is_a_share_of_the_pool_and_absent_without_one() -> None:
    row = {"kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 12, "cacheHitRate": 0.5}}
    snapshot = load_snapshot(row)
    assert snapshot is not None
    assert (snapshot.kv_used_blocks, snapshot.gpu_cache_usage, snapshot.kv_cache_hit_rate) == (3, 0.25, 0.5)
    assert load_snapshot({"numActiveRequests": 1}) is None

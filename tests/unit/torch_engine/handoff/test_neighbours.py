"""Neighbours of one host, several of them in this process: they meet over real sockets all the same."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from trtx.torch_engine.handoff.codec import DirectOffer, layout_of
from trtx.torch_engine.handoff.memory import MemoryUnreachable, ProcessMemory
from trtx.torch_engine.handoff.neighbours import Neighbours
from trtx.torch_engine.kv_layout import KvGeometry

GEOMETRY = KvGeometry.uniform(num_layers=1, num_kv_heads=1, head_dim=8, tokens_per_block=2, dtype="float32")
WAIT_S = 20


class WatchedMemory(ProcessMemory):
    """Says what is opened and shut. ``refuses``: opens nothing."""

    def __init__(self, refuses: bool = False) -> None:
        self.pool = torch.arange(4 * GEOMETRY.block_bytes // 4, dtype=torch.float32)
        super().__init__(self.pool, GEOMETRY.block_bytes)
        self.refuses = refuses
        self.seen: SimpleQueue[str] = SimpleQueue()

    def open(self, offer: DirectOffer, pid: int) -> tuple[int, int]:
        self.seen.put("open")
        if self.refuses:
            raise MemoryUnreachable("no")
        return super().open(offer, pid)

    def shut(self, pool: Any) -> None:
        super().shut(pool)
        self.seen.put("shut")


class Engine:
    def __init__(self, group: str | None, geometry: KvGeometry = GEOMETRY, *, refuses: bool = False) -> None:
        self.memory = WatchedMemory(refuses)
        self.released: SimpleQueue[int] = SimpleQueue()
        self.neighbours = Neighbours(self.memory, layout_of(geometry), group, self.released.put)


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def begin(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        if engine.neighbours._thread.is_alive():
            engine.neighbours.close()


@pytest.fixture
def group() -> str:
    return os.urandom(8).hex()


def test_engines_of_a_group_open_each_others_pools_before_anybody_reads(start: Start, group: str) -> None:
    first, second = start(group), start(group)
    assert first.memory.seen.get(timeout=WAIT_S) == second.memory.seen.get(timeout=WAIT_S) == "open"
    third = start(group)
    assert [third.memory.seen.get(timeout=WAIT_S) for _ in range(2)] == ["open", "open"]
    assert first.memory.seen.get(timeout=WAIT_S) == second.memory.seen.get(timeout=WAIT_S) == "open"
    found = first.neighbours.find(third.neighbours.offer)  # opened once
    assert found is not None and found.pool == (os.getpid(), third.memory.offset)
    assert first.memory.seen.empty()


def test_another_group_or_none_is_left_alone_until_a_read_names_it(start: Start, group: str) -> None:
    for ours, theirs in ((group, group + "x"), (group + "y", None), (None, group + "z")):
        reader, exporter = start(ours), start(theirs)  # new ones: who is read from opens its reader's pool as well
        assert reader.memory.seen.empty()
        assert reader.neighbours.find(exporter.neighbours.offer) is not None
        assert reader.memory.seen.get(timeout=WAIT_S) == "open"


def test_another_geometry_is_not_opened(start: Start, group: str) -> None:
    first = start(group)
    other = start(group, replace(GEOMETRY, tokens_per_block=4))
    same = start(group)
    assert first.memory.seen.get(timeout=WAIT_S) == same.memory.seen.get(timeout=WAIT_S) == "open"
    assert other.memory.seen.empty() and first.memory.seen.empty()


def test_a_pool_is_shut_when_its_engine_goes_though_nobody_asks(start: Start) -> None:
    reader, exporter = start(None), start(None)
    found = reader.neighbours.find(exporter.neighbours.offer)
    assert found is not None
    reader.neighbours.leave(found)
    assert reader.memory.seen.get(timeout=WAIT_S) == "open"
    exporter.neighbours.close()
    assert reader.memory.seen.get(timeout=WAIT_S) == "shut"
    again = reader.neighbours.find(exporter.neighbours.offer)
    assert again is found and again.is_gone
    assert not reader.neighbours.tell_released(exporter.neighbours.offer.address, 1)


def test_a_pool_stays_open_until_the_copies_from_it_have_ended(start: Start) -> None:
    reader, exporter = start(None), start(None)
    found = [reader.neighbours.find(exporter.neighbours.offer) for _ in range(2)]
    assert reader.memory.seen.get(timeout=WAIT_S) == "open"
    exporter.neighbours.close()
    deadline = time.monotonic() + WAIT_S
    while found[0] is not None and not found[0].is_gone:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for neighbour in found:
        assert neighbour is not None and neighbour.pool is not None and reader.memory.seen.empty()
        reader.neighbours.leave(neighbour)
    assert reader.memory.seen.get(timeout=WAIT_S) == "shut"


def test_a_release_arrives_with_or_without_a_read_before(start: Start) -> None:
    reader, exporter = start(None), start(None)
    address = exporter.neighbours.offer.address
    assert reader.neighbours.tell_released(address, 4)
    assert reader.neighbours.find(exporter.neighbours.offer) is not None
    assert reader.neighbours.tell_released(address, 5)
    assert [exporter.released.get(timeout=WAIT_S) for _ in range(2)] == [4, 5]
    assert not reader.neighbours.tell_released("trtx-kv-nobody", 6)


def test_a_pool_that_cannot_be_opened_is_tried_once(start: Start) -> None:
    reader, exporter = start(None, refuses=True), start(None)
    assert reader.neighbours.find(exporter.neighbours.offer) is None
    assert reader.neighbours.find(exporter.neighbours.offer) is None
    assert reader.memory.seen.get(timeout=WAIT_S) == "open" and reader.memory.seen.empty()
    assert reader.neighbours.tell_released(exporter.neighbours.offer.address, 7)
    assert exporter.released.get(timeout=WAIT_S) == 7


def test_noise_on_the_socket_harms_nobody(start: Start) -> None:
    reader, exporter = start(None), start(None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect("\0" + exporter.neighbours.offer.address)
        assert stranger.recv(65536)  # the greeting
        stranger.send(b"\xff" * 1000)
        assert stranger.recv(65536) == b""
    assert reader.neighbours.find(exporter.neighbours.offer) is not None
    assert reader.neighbours.tell_released(exporter.neighbours.offer.address, 8)
    assert exporter.released.get(timeout=WAIT_S) == 8


def test_a_full_connection_to_a_frozen_engine_holds_nobody_up(start: Start) -> None:
    reader = start(None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as frozen:  # listens, and takes nothing in
        frozen.bind("\0trtx-kv-frozen-" + os.urandom(8).hex())
        frozen.listen(1)
        address = frozen.getsockname()[1:].decode()
        assert all(reader.neighbours.tell_released(address, lease_id) for lease_id in range(3000))


def test_a_closed_engine_leaves_no_thread_and_no_listener(start: Start) -> None:
    engine = start(None)
    engine.neighbours.close()
    assert not any(thread.name == "kv-neighbours" for thread in threading.enumerate())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late, pytest.raises(ConnectionRefusedError):
        late.connect("\0" + engine.neighbours.offer.address)

"""KV handoff between two real processes on CPU memory, by each route and by both."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import torch
from handoff_peer import GEOMETRY, Exporter, empty_pool, random_pool
from processes import freeze

from trtx.torch_engine.handoff import (
    ROUTES,
    FailedRead,
    FinishedRead,
    KvTransport,
    LayoutMismatch,
    LeaseExpired,
    PeerGone,
    codec,
    create_transport,
)

NUM_BLOCKS = 256
SEED = 7


@pytest.fixture(scope="module")
def spares() -> Iterator[list[Exporter]]:
    """Exporters that a test may kill: they take 4 s to start, so all start at once."""
    started = [Exporter(SEED, NUM_BLOCKS) for _ in range(4)]
    yield list(started)
    for exporter in started:
        exporter.kill()


@pytest.fixture(scope="module")
def exporter(spares: list[Exporter]) -> Exporter:
    """One that every test leaves alive."""
    return spares.pop()


@pytest.fixture
def spare(spares: list[Exporter]) -> Exporter:
    return spares.pop()


@pytest.fixture
def pool() -> torch.Tensor:
    return empty_pool(NUM_BLOCKS)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def transport(pool: torch.Tensor, route: str) -> Iterator[KvTransport]:
    """A reader that knows one route; exporters offer all."""
    created = create_transport(pool, GEOMETRY, routes=[route])
    yield created
    created.close()


def wait_for_reads(transport: KvTransport, count: int = 1) -> list[FinishedRead | FailedRead]:
    """The next ``count`` reads that end, either way."""
    ended: list[FinishedRead | FailedRead] = []
    deadline = time.monotonic() + 30
    while len(ended) < count:
        events = transport.poll()
        ended += [*events.finished, *events.failed]
        assert time.monotonic() < deadline, f"{len(ended)} of {count} reads ended within 30 s"
        time.sleep(0.0002)
    return ended


def test_a_read_copies_exactly_the_named_blocks_and_releases_the_lease(
    exporter: Exporter, pool: torch.Tensor, transport: KvTransport
) -> None:
    theirs = random_pool(NUM_BLOCKS, SEED)
    draw = random.Random(1)
    for lease_id in range(100, 108):
        exported = draw.sample(range(NUM_BLOCKS), draw.randint(1, 64))
        positions = draw.sample(range(len(exported)), draw.randint(1, len(exported)))
        local = draw.sample(range(NUM_BLOCKS), len(positions))
        before = pool.clone()
        read_id = transport.begin_read(exporter.export(lease_id, exported), positions, local)
        [ended] = wait_for_reads(transport)
        assert isinstance(ended, FinishedRead) and ended.read_id == read_id
        assert ended.num_bytes == len(positions) * GEOMETRY.block_bytes and ended.seconds > 0
        before[local] = theirs[[exported[p] for p in positions]]
        assert torch.equal(pool, before)
        exporter.wait_for_release(lease_id)
    assert transport.pending_reads == 0


def test_a_release_without_a_read_reaches_the_exporter(exporter: Exporter, transport: KvTransport) -> None:
    opaque_state = exporter.export(110, [1, 2])
    transport.release(opaque_state)
    exporter.wait_for_release(110)


def test_a_read_of_nothing_finishes_and_releases_the_lease(exporter: Exporter, transport: KvTransport) -> None:
    read_id = transport.begin_read(exporter.export(111, [1, 2]), [], [])
    [ended] = wait_for_reads(transport)
    assert isinstance(ended, FinishedRead) and (ended.read_id, ended.num_bytes) == (read_id, 0)
    exporter.wait_for_release(111)


def test_an_engine_can_read_its_own_export(pool: torch.Tensor, transport: KvTransport) -> None:
    pool[3].fill_(1.5)
    transport.begin_read(transport.export(112, [3], 32, time.time() + 60), [0], [9])
    released: list[int] = []
    finished: list[FinishedRead] = []
    deadline = time.monotonic() + 30
    while not (released and finished) and time.monotonic() < deadline:
        events = transport.poll()
        released += events.released
        finished += events.finished
        time.sleep(0.0002)
    assert released == [112] and len(finished) == 1
    assert torch.equal(pool[9], pool[3])


def test_many_reads_from_two_peers_run_at_once(
    exporter: Exporter, spares: list[Exporter], pool: torch.Tensor, transport: KvTransport
) -> None:
    theirs = random_pool(NUM_BLOCKS, SEED)
    peers = [exporter, spares[0]]
    opaque_states = [peers[i % 2].export(200 + i, [i, i + 1, i + 2]) for i in range(64)]
    reads = {transport.begin_read(state, range(3), range(3 * i, 3 * i + 3)) for i, state in enumerate(opaque_states)}
    ended = wait_for_reads(transport, 64)
    assert {e.read_id for e in ended if isinstance(e, FinishedRead)} == reads
    assert torch.equal(pool[:192], torch.cat([theirs[i : i + 3] for i in range(64)]))
    exporter.wait_for_release(*range(200, 264, 2))
    peers[1].wait_for_release(*range(201, 264, 2))


def test_an_expired_lease_is_refused_before_anything_moves(exporter: Exporter, transport: KvTransport) -> None:
    with pytest.raises(LeaseExpired, match=r"lease 120 .* ended \d+\.\d s ago"):
        transport.begin_read(exporter.export(120, [1], time.time() - 2), [0], [0])
    assert transport.pending_reads == 0


def test_a_read_that_is_seen_only_after_its_deadline_counts_as_failed(
    exporter: Exporter, pool: torch.Tensor, route: str
) -> None:
    now = [1000.0]
    transport = create_transport(pool, GEOMETRY, routes=[route], clock=lambda: now[0])
    try:
        read_id = transport.begin_read(exporter.export(121, [1], 1010.0), [0], [0])
        # CPU memory is copied inside begin_read, so the bytes are here although nobody has looked yet.
        now[0] = 1010.0
        [ended] = wait_for_reads(transport)
        assert isinstance(ended, FailedRead) and ended.read_id == read_id and "deadline" in ended.reason
    finally:
        transport.close()


def test_another_layout_is_refused_with_both_sides_named(exporter: Exporter, route: str) -> None:
    ours = replace(GEOMETRY, tokens_per_block=16)
    transport = create_transport(empty_pool(8, ours), ours, routes=[route])
    try:
        with pytest.raises(LayoutMismatch, match="tokens_per_block is 32 on prefill, 16 on decode"):
            transport.begin_read(exporter.export(130, [1]), [0], [0])
        assert transport.pending_reads == 0
    finally:
        transport.close()


def test_pairs_outside_either_pool_are_refused(exporter: Exporter, transport: KvTransport) -> None:
    opaque_state = exporter.export(131, [1, 2])
    with pytest.raises(ValueError, match="2 to 2 index 2 exported"):
        transport.begin_read(opaque_state, [2], [0])
    with pytest.raises(ValueError, match=f"of {NUM_BLOCKS}"):
        transport.begin_read(opaque_state, [0], [NUM_BLOCKS])
    with pytest.raises(ValueError, match="2 positions for 1 local"):
        transport.begin_read(opaque_state, [0, 1], [0])


def test_a_pool_of_another_shape_than_its_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a contiguous"):
        create_transport(empty_pool(8), replace(GEOMETRY, tokens_per_block=16))


def test_a_peer_that_died_is_reported_at_once_and_its_successor_is_read_under_its_own_name(
    spare: Exporter, exporter: Exporter, pool: torch.Tensor, transport: KvTransport
) -> None:
    connected, unused = spare.export(140, [1]), spare.export(141, [2])
    transport.begin_read(connected, [0], [0])
    assert isinstance(wait_for_reads(transport)[0], FinishedRead)
    spare.kill()
    for _ in range(2):  # first over the connection that broke, then while connecting anew
        try:
            transport.begin_read(unused, [0], [1])
        except PeerGone as error:
            assert "lease 141" in str(error)
        else:  # nobody had noticed yet
            assert isinstance(wait_for_reads(transport)[0], FailedRead)
    transport.release(unused)  # best effort: does not raise
    assert transport.pending_reads == 0
    transport.begin_read(exporter.export(140, [5]), [0], [1])
    assert isinstance(wait_for_reads(transport)[0], FinishedRead)
    assert torch.equal(pool[1], random_pool(NUM_BLOCKS, SEED)[5])
    exporter.wait_for_release(140)


def test_nixl_reads_fail_when_their_peer_dies_and_other_peers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # where the peer sends: a read from a frozen one stays pending
    dying, other = Exporter(SEED, NUM_BLOCKS), Exporter(SEED, NUM_BLOCKS)
    transport = create_transport(empty_pool(NUM_BLOCKS), GEOMETRY, routes=["nixl"])
    try:
        transport.begin_read(dying.export(150, [1]), [0], [0])
        wait_for_reads(transport)
        opaque_states = [dying.export(151 + i, [i]) for i in range(3)]
        freeze(dying.pid)
        reads = {transport.begin_read(state, [0], [i]) for i, state in enumerate(opaque_states)}
        dying.kill()
        ended = wait_for_reads(transport, 3)
        assert {e.read_id for e in ended if isinstance(e, FailedRead)} == reads
        transport.begin_read(other.export(155, [1]), [0], [0])
        assert isinstance(wait_for_reads(transport)[0], FinishedRead)
        other.wait_for_release(155)
    finally:
        transport.close()
        dying.kill()
        other.kill()


@pytest.mark.proof  # a deadline's seconds; a peer that dies is above
def test_a_frozen_peer_fails_its_nixl_reads_at_their_deadline_and_never_writes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # where the peer sends, and a cancelled read may still arrive
    frozen, other = Exporter(SEED, NUM_BLOCKS), Exporter(SEED, NUM_BLOCKS)
    pool = empty_pool(NUM_BLOCKS)
    now = [1000.0]
    transport = create_transport(pool, GEOMETRY, routes=["nixl"], clock=lambda: now[0])
    try:
        transport.begin_read(frozen.export(170, [1], 1010.0), [0], [0])
        wait_for_reads(transport)
        opaque_state = frozen.export(171, list(range(64)), 1010.0)
        freeze(frozen.pid)
        read_id = transport.begin_read(opaque_state, range(64), range(64))
        assert not transport.poll()
        now[0] = 1010.0
        [ended] = wait_for_reads(transport)
        assert isinstance(ended, FailedRead) and ended.read_id == read_id and "deadline" in ended.reason
        pool.zero_()  # the blocks belong to another sequence now
        os.kill(frozen.pid, signal.SIGCONT)
        frozen.wait_until_thawed()
        transport.begin_read(other.export(172, [3], 1020.0), [0], [100])
        assert isinstance(wait_for_reads(transport)[0], FinishedRead)
        assert not pool[:100].any() and pool[100].all()
    finally:
        transport.close()
        frozen.kill()
        other.kill()


def test_a_direct_read_needs_nothing_of_a_frozen_peer_and_fails_if_the_peer_dies_before_it_is_seen_to_end(
    spare: Exporter, pool: torch.Tensor
) -> None:
    transport = create_transport(pool, GEOMETRY)
    try:
        whole = spare.export(173, list(range(64)))
        freeze(spare.pid)
        transport.begin_read(whole, range(64), range(64))
        [ended] = wait_for_reads(transport)
        assert isinstance(ended, FinishedRead)
        assert torch.equal(pool[:64], random_pool(NUM_BLOCKS, SEED)[:64])
        os.kill(spare.pid, signal.SIGCONT)
        spare.wait_for_release(173)
        first, second = spare.export(174, [1]), spare.export(175, [2])
        read_id = transport.begin_read(first, [0], [0])
        spare.kill()
        [ended] = wait_for_reads(transport)
        assert isinstance(ended, FailedRead) and ended.read_id == read_id and "gone" in ended.reason
        with pytest.raises(PeerGone, match="lease 175"):
            transport.begin_read(second, [0], [0])
        transport.release(second)
        assert transport.pending_reads == 0
    finally:
        transport.close()


@pytest.mark.parametrize("changes", [{"offset": 16}, {"host": "another"}, {"address": "trtx-kv-none"}])
def test_what_cannot_be_read_directly_comes_over_nixl(
    exporter: Exporter, pool: torch.Tensor, changes: dict[str, Any]
) -> None:
    transport = create_transport(pool, GEOMETRY)
    try:
        exported = codec.decode(exporter.export(176, [7]))
        assert exported.direct is not None
        unreadable = msgspec.structs.replace(exported, direct=msgspec.structs.replace(exported.direct, **changes))
        transport.begin_read(codec.encode(unreadable), [0], [3])
        assert isinstance(wait_for_reads(transport)[0], FinishedRead)
        assert torch.equal(pool[3], random_pool(NUM_BLOCKS, SEED)[7])
        exporter.wait_for_release(176)
    finally:
        transport.close()


def test_an_exporter_that_offers_no_known_way_is_refused_by_name(exporter: Exporter, transport: KvTransport) -> None:
    exported = msgspec.structs.replace(codec.decode(exporter.export(177, [1])), direct=None, nixl=None)
    with pytest.raises(LayoutMismatch, match=f"{exported.engine} offers no KV transport"):
        transport.begin_read(codec.encode(exported), [0], [0])


def test_nothing_listens_beyond_loopback(exporter: Exporter, transport: KvTransport) -> None:
    transport.release(exporter.export(180, [1]))
    exporter.wait_for_release(180)
    for pid in (os.getpid(), exporter.pid):
        listeners = [c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listeners) <= {"127.0.0.1", "::1"}
        assert listeners or pid == os.getpid()  # a reader that knows the direct route alone has none


def test_an_idle_agent_sleeps(exporter: Exporter) -> None:
    assert exporter.ask("idle", 1.0) < 0.3  # seconds of CPU in one of idling; a spinning progress thread takes 1.0


def test_close_ends_pending_reads_and_frees_the_pool_for_another_transport(
    exporter: Exporter, pool: torch.Tensor, transport: KvTransport, route: str
) -> None:
    first = create_transport(pool, GEOMETRY, routes=[route])
    first.begin_read(exporter.export(190, [1]), [0], [0])
    first.close()
    first.close()
    transport.begin_read(exporter.export(191, [1]), [0], [1])
    assert isinstance(wait_for_reads(transport)[0], FinishedRead)

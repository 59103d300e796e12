"""KV handoff between two processes on GPUs: two of them where there are two, else one that both use."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from cuda_exporter import GEOMETRY, CudaExporter, new_pool, words
from processes import freeze

from trtx.torch_engine.handoff import (
    ROUTES,
    FailedRead,
    FinishedRead,
    KvTransport,
    PeerGone,
    codec,
    create_transport,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
NUM_BLOCKS, MANY = 128, 2048


@pytest.fixture(scope="module")
def exporter() -> Iterator[CudaExporter]:
    started = CudaExporter(NUM_BLOCKS)
    yield started
    started.kill()


@pytest.fixture(scope="module")
def spares() -> Iterator[list[CudaExporter]]:
    """Those that a test may kill, with much to copy."""
    started = [CudaExporter(MANY, ("direct",)) for _ in range(4)]
    yield list(started)
    for one in started:
        one.kill()


@pytest.fixture
def pool() -> torch.Tensor:
    return new_pool(NUM_BLOCKS)


@pytest.fixture(params=[["direct"], ["nixl"], list(ROUTES)], ids="-".join)
def transport(pool: torch.Tensor, request: pytest.FixtureRequest) -> Iterator[KvTransport]:
    created = create_transport(pool, GEOMETRY, routes=request.param)
    yield created
    created.close()


def ended(transport: KvTransport) -> FinishedRead | FailedRead:
    deadline = time.monotonic() + 30
    while not (events := transport.poll()):
        assert time.monotonic() < deadline, "the read did not end within 30 s"
    return (*events.finished, *events.failed)[0]


def test_a_read_copies_exactly_the_named_blocks_and_releases_the_lease(
    exporter: CudaExporter, pool: torch.Tensor, transport: KvTransport
) -> None:
    draw = random.Random(1)
    for lease_id, count in enumerate((1, 3, 32, 100)):
        exported = draw.sample(range(NUM_BLOCKS), count)
        positions = draw.sample(range(count), draw.randint(1, count))
        local = draw.sample(range(NUM_BLOCKS), len(positions))
        pool.zero_()
        torch.cuda.synchronize()  # a copy waits for nothing that writes to its blocks: they are nobody's
        transport.begin_read(exporter.export(lease_id, exported), positions, local)
        assert isinstance(ended(transport), FinishedRead)
        expected = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device="cuda")
        expected[local] = torch.tensor([exported[p] + 1 for p in positions], dtype=torch.int32, device="cuda")
        assert bool((words(pool) == expected.unsqueeze(1)).all())
        assert exporter.wait_for_release() == [lease_id]


def test_a_read_waits_for_no_step_under_way(exporter: CudaExporter, pool: torch.Tensor) -> None:
    """Nor need it: blocks are nobody's until the last step that writes to them is done."""
    transport = create_transport(pool, GEOMETRY, routes=["direct"])
    for lease_id, local in ((10, 2), (11, 3)):  # the first one opens the exporter's pool
        opaque_state = exporter.export(lease_id, [5])
        if lease_id == 11:
            torch.cuda._sleep(4_000_000_000)  # cycles: 2 s
        transport.begin_read(opaque_state, [0], [local])
        assert isinstance(ended(transport), FinishedRead)
        assert exporter.wait_for_release() == [lease_id]
    assert not torch.cuda.current_stream().query(), "the step ended before the read"
    assert bool((words(pool)[2:4] == 6).all())
    transport.close()


def test_a_handle_that_cannot_be_opened_is_passed_by_over_nixl(exporter: CudaExporter, pool: torch.Tensor) -> None:
    transport = create_transport(pool, GEOMETRY)
    exported = codec.decode(exporter.export(20, [7]))
    assert exported.direct is not None
    for handle in (bytes(64), b"short"):
        broken = msgspec.structs.replace(exported.direct, handle=handle)
        transport.begin_read(codec.encode(msgspec.structs.replace(exported, direct=broken)), [0], [3])
        assert isinstance(ended(transport), FinishedRead)
        assert bool((words(pool)[3] == 8).all())
        assert exporter.wait_for_release() == [20]
    transport.close()


def test_a_frozen_exporter_is_read_and_the_deadline_holds(spares: list[CudaExporter], pool: torch.Tensor) -> None:
    now = [1000.0]
    transport = create_transport(pool, GEOMETRY, routes=["direct"], clock=lambda: now[0])
    frozen = spares[0]
    first, second = (frozen.export(lease_id, list(range(64)), 1010.0) for lease_id in (30, 31))
    freeze(frozen.pid)
    transport.begin_read(first, range(64), range(64))
    assert isinstance(ended(transport), FinishedRead)
    transport.begin_read(second, range(64), range(64, 128))
    now[0] = 1010.0
    found = ended(transport)
    assert isinstance(found, FailedRead) and "deadline" in found.reason
    transport.release(second)
    pool.zero_()
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait_for_release()[0] == 30
    torch.cuda.synchronize()
    assert not words(pool).any()
    transport.close()


def test_an_exporter_that_dies_in_the_middle_fails_its_read_and_gives_its_memory_back(
    spares: list[CudaExporter],
) -> None:
    pool = new_pool(MANY)
    transport = create_transport(pool, GEOMETRY, routes=["direct"])
    for _ in range(3):
        dying = spares.pop()
        opaque_states = [dying.export(lease_id, list(range(MANY))) for lease_id in (40, 41)]
        held = torch.cuda.mem_get_info()[0]
        transport.begin_read(opaque_states[0], range(MANY), range(MANY))
        dying.kill()
        found = ended(transport)
        assert isinstance(found, FailedRead) and "gone" in found.reason
        torch.cuda.synchronize()  # no sticky error
        with pytest.raises(PeerGone, match="lease 41"):
            transport.begin_read(opaque_states[1], range(MANY), range(MANY))
        if torch.cuda.device_count() == 1:
            deadline = time.monotonic() + 30
            while torch.cuda.mem_get_info()[0] < held + pool.nbytes:
                assert time.monotonic() < deadline, "the dead exporter's pool was not freed within 30 s"
                time.sleep(0.05)
    living = spares[-1]
    transport.begin_read(living.export(42, [1, 2, 3]), range(3), [9, 8, 7])
    assert isinstance(ended(transport), FinishedRead)
    assert words(pool)[7:10, 0].tolist() == [4, 3, 2]
    transport.close()

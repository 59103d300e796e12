"""Embeddings over NIXL between two processes that share no directory, CPU to CPU, with deaths at either end."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from embedding_peer import DTYPE, WIDTH, Exporter, embedding
from processes import freeze, until

from trtx.ipc.shared_tensor import open_shared, remove_shared, share
from trtx.torch_engine.embeddings import (
    EmbeddingExports,
    EmbeddingGone,
    EmbeddingHandle,
    EmbeddingMismatch,
    EmbeddingReader,
)

ARENA = 16 << 20
ROWS = 577  # of LLaVA 1.5 with its class token: the last block is part full


@pytest.fixture(scope="module")
def reader() -> Iterator[EmbeddingReader]:
    started = EmbeddingReader(arena_bytes=ARENA)
    yield started
    started.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[float], Exporter]]:
    started: list[Exporter] = []
    directory = tmp_path_factory.mktemp("exporters")

    def begin(lease_s: float) -> Exporter:
        started.append(Exporter(directory / str(len(started)), arena_bytes=ARENA, lease_s=lease_s))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def the_peer(start: Callable[[float], Exporter]) -> Exporter:
    return start(60)


@pytest.fixture
def peer(the_peer: Exporter) -> Iterator[Exporter]:
    """An exporter that no test harms. It holds nothing when a test begins."""
    until("no lease is left", lambda: the_peer.ask("held")[0] == 0)
    yield the_peer


def read(reader: EmbeddingReader, handle: EmbeddingHandle) -> torch.Tensor:
    taken = reader.read(handle, width=WIDTH, dtype=DTYPE)
    rows = open_shared(taken)
    remove_shared(taken)
    return rows


def test_rows_arrive_bit_for_bit_and_their_lease_ends(reader: EmbeddingReader, peer: Exporter) -> None:
    handles = [peer.offer(seed, rows) for seed, rows in ((1, ROWS), (2, 1), (3, 64))]
    assert peer.ask("held") == [3, (ROWS + 1 + 64) * WIDTH * 2, 0]
    for seed, handle in reversed(list(enumerate(handles, start=1))):
        assert torch.equal(read(reader, handle), embedding(seed, handle.tensor_size[0]))
    until("the peer holds nothing", lambda: peer.ask("held") == [0, 0, 0])
    narrow = peer.offer(4, 1)
    with pytest.raises(EmbeddingMismatch, match="4096 columns of bfloat16; expected 4097"):
        reader.read(narrow, width=WIDTH + 1, dtype=DTYPE)
    assert torch.equal(read(reader, narrow), embedding(4, 1))


def test_the_arena_is_bounded_at_both_ends(reader: EmbeddingReader, peer: Exporter) -> None:
    rows = ARENA // (WIDTH * 2)
    whole = peer.offer(1, rows)
    assert "NIXL arena" in peer.ask("offer", 2, 1)
    assert peer.ask("held")[0] == 1
    assert torch.equal(read(reader, whole), embedding(1, rows))
    until("no lease is left", lambda: peer.ask("held")[0] == 0)
    free = peer.offer(2, 1)
    small = EmbeddingReader(arena_bytes=1 << 20)
    with pytest.raises(EmbeddingMismatch, match="expected at most 1048576"):
        small.read(whole, width=WIDTH, dtype=DTYPE)
    small.close()
    assert torch.equal(read(reader, free), embedding(2, 1))


def test_a_killed_exporter_costs_its_own_embeddings_alone(
    reader: EmbeddingReader, start: Callable[[float], Exporter], peer: Exporter
) -> None:
    dead = start(10)
    read(reader, dead.offer(1, ROWS))  # so that the reader is connected
    lost = dead.offer(2, ROWS)
    dead.process.send_signal(signal.SIGKILL)
    dead.process.wait()
    with pytest.raises(EmbeddingGone, match="encode"):
        read(reader, lost)
    never = EmbeddingReader(arena_bytes=1 << 23)  # one that was not connected to it
    with pytest.raises(EmbeddingGone, match="encode"):
        read(never, lost)
    never.close()
    assert torch.equal(read(reader, peer.offer(3, ROWS)), embedding(3, ROWS))


@pytest.mark.proof  # a deadline's seconds
def test_a_frozen_exporter_is_given_up_at_the_deadline(
    reader: EmbeddingReader, start: Callable[[float], Exporter], peer: Exporter
) -> None:
    """UCX copies CPU memory of the same host without the other's help, so that a frozen one may be read all the same;
    over a network it would not answer. Either way nobody waits past the deadline, and the reader goes on."""
    frozen = start(3)
    handle = frozen.offer(1, ROWS)
    freeze(frozen.process.pid)
    try:
        rows = read(reader, handle)
    except EmbeddingGone as error:
        assert "deadline" in str(error) or "gone" in str(error)
    else:
        assert torch.equal(rows, embedding(1, ROWS))
    assert time.time() < handle.deadline_s + 20
    frozen.process.send_signal(signal.SIGCONT)
    assert torch.equal(read(reader, peer.offer(2, ROWS)), embedding(2, ROWS))


@pytest.mark.proof  # a deadline's seconds
def test_a_reader_that_never_comes_costs_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exports = EmbeddingExports(arena_bytes=1 << 20, lease_s=0.2)
    exports.offer(b"", share(embedding(1, 8)), None)
    until("the lease has expired", lambda: (exports.leases, exports.leased_bytes, exports.expired) == (0, 0, 1))
    whole = (1 << 20) // (WIDTH * 2)
    assert exports.offer(b"", share(embedding(1, whole)), None).nixl is not None  # all blocks are free again
    exports.close()
    assert not list(tmp_path.iterdir())

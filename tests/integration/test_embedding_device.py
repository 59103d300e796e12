"""Embeddings that stay on their encoder's device, between two processes of one host, with deaths at either end.

Here the device is a CPU, whose memory the kernel copies; ``tests/gpu/test_embeddings_cuda.py`` runs these on GPUs.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from device_peer import Encoder
from embedding_peer import DTYPE, WIDTH, embedding
from processes import freeze, until

from trtx.ipc.shared_tensor import SharedTensor, SharedTensorElsewhere, open_shared, remove_shared, share_place
from trtx.torch_engine.embeddings import EmbeddingGone, EmbeddingHandle, EmbeddingReader, EmbeddingUnreachable
from trtx.torch_engine.embeddings.device import DevicePlace
from trtx.torch_engine.runner.embeddings import EmbeddingLoader

ARENA = 16 << 20
ROWS = 577  # of LLaVA 1.5 with its class token: the last block is part full
Start = Callable[..., Encoder]


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("scratch")
        patch.setattr(tempfile, "tempdir", str(path))
        yield path


@pytest.fixture(scope="module")
def start(scratch: Path, device: str) -> Iterator[Start]:
    started: list[Encoder] = []

    def begin(lease_s: float = 60.0) -> Encoder:
        started.append(Encoder(scratch, device=device, arena_bytes=ARENA, lease_s=lease_s))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def the_encoder(start: Start) -> Encoder:
    return start()


@pytest.fixture
def encoder(the_encoder: Encoder, scratch: Path) -> Iterator[Encoder]:
    """One that no test harms, with nothing left in it by any."""
    yield the_encoder
    for path in scratch.glob("*.ta*"):  # what others keep, or took
        path.unlink()
    assert the_encoder.held() == (0, 0)


@pytest.fixture
def loader(device: str) -> Iterator[EmbeddingLoader]:
    made = EmbeddingLoader(torch.device(device), WIDTH, torch.bfloat16)
    yield made
    made.close()


def taken(handle: EmbeddingHandle) -> SharedTensor:
    return EmbeddingReader().read(handle, width=WIDTH, dtype=DTYPE)


def place_of(shared: SharedTensor) -> DevicePlace:
    with pytest.raises(SharedTensorElsewhere) as there:
        open_shared(shared)
    return msgspec.msgpack.decode(there.value.place, type=DevicePlace)


def arrives(loader: EmbeddingLoader, shared: SharedTensor, seed: int) -> bool:
    """As a worker gives it to its engine."""
    try:
        loaded = loader.load(shared)
    finally:
        remove_shared(shared)
    return torch.equal(loaded.tensor.cpu(), embedding(seed, loaded.rows))


def test_rows_arrive_bit_for_bit_from_memory_and_nothing_is_left(
    encoder: Encoder, loader: EmbeddingLoader, scratch: Path
) -> None:
    handles = [encoder.offer(seed, rows) for seed, rows in ((1, ROWS), (2, 1), (3, 64))]
    assert encoder.held() == (3, 3)
    # What keeps them is small: their data are in no file.
    assert sum(path.stat().st_size for path in scratch.iterdir()) < 100_000
    for seed, handle in reversed(list(enumerate(handles, start=1))):
        shared = taken(handle)
        assert place_of(shared).block_ids
        with pytest.raises(EmbeddingGone, match="encode the image again"):
            taken(handle)  # another reader
        assert arrives(loader, shared, seed)
    assert encoder.held() == (0, 0)
    assert not list(scratch.iterdir())


def test_an_arena_that_is_full_leaves_the_next_to_a_file_and_is_used_again(
    encoder: Encoder, loader: EmbeddingLoader
) -> None:
    whole = ARENA // (WIDTH * 2)
    first, second = encoder.offer(1, whole - 8), encoder.offer(2, 64)
    assert encoder.held() == (2, 1)
    assert arrives(loader, taken(second), 2) and arrives(loader, taken(first), 1)
    assert encoder.held() == (0, 0)
    assert place_of(taken(encoder.offer(3, whole))).num_blocks == ARENA >> 16


@pytest.mark.proof  # an encoder and a deadline of its own
def test_one_that_was_taken_over_and_never_removed_costs_a_deadline(start: Start) -> None:
    """Whoever took it was killed, say."""
    encoder = start(lease_s=0.3)
    lost = [taken(encoder.offer(1, ROWS)).path, encoder.offer(2, ROWS).path]  # of the second no reader came
    until("the encoder holds nothing", lambda: encoder.held() == (0, 0))
    assert not any(Path(path or "").exists() for path in lost)


@pytest.mark.proof  # of files, test_embedding_handoff.py asks the same
def test_a_killed_encoder_costs_its_own_embeddings_alone(
    start: Start, encoder: Encoder, loader: EmbeddingLoader, device: str
) -> None:
    dead = start()
    assert arrives(loader, taken(dead.offer(1, ROWS)), 1)  # so that the reader has its memory open
    lost = [taken(dead.offer(seed, ROWS)) for seed in (2, 3)]
    dead.process.send_signal(signal.SIGKILL)
    dead.process.wait()
    with pytest.raises(EmbeddingGone, match="encode"):
        arrives(loader, lost[0], 2)
    never = EmbeddingLoader(torch.device(device), WIDTH, torch.bfloat16)  # one that had not opened it
    with pytest.raises(EmbeddingGone, match="encode"):
        arrives(never, lost[1], 3)
    never.close()
    reader: Any = loader._reader
    (gone,) = [one for one in reader._neighbours._known.values() if one.pid == dead.process.pid]
    until("the pool is closed", lambda: gone.pool is None)  # its GPU memory may stay taken while somebody has it open
    assert arrives(loader, taken(encoder.offer(4, ROWS)), 4)


def test_a_frozen_encoder_is_read(encoder: Encoder, loader: EmbeddingLoader) -> None:
    assert arrives(loader, taken(encoder.offer(1, 1)), 1)
    handle = encoder.offer(2, ROWS)
    freeze(encoder.process.pid)
    assert arrives(loader, taken(handle), 2)
    encoder.process.send_signal(signal.SIGCONT)
    assert encoder.held() == (0, 0)


@pytest.mark.parametrize("end", ["lease", "encoder"])
def test_what_ends_during_a_copy_is_not_taken_for_an_embedding(
    start: Start, encoder: Encoder, loader: EmbeddingLoader, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    ended = encoder if end == "lease" else start()
    assert arrives(loader, taken(ended.offer(1, 1)), 1)
    shared = taken(ended.offer(2, ROWS))
    memory: Any = loader._reader._memory  # type: ignore[union-attr]
    copy = memory.copy

    def late(*asked: Any) -> None:
        copy(*asked)
        if end == "lease":
            remove_shared(shared)
        else:
            ended.process.kill()
            ended.process.wait()

    monkeypatch.setattr(memory, "copy", late)
    with pytest.raises(EmbeddingGone, match="lease ended" if end == "lease" else "died while"):
        loader.load(shared)


@pytest.mark.parametrize("changed", ["kind", "host", "memory"])
def test_memory_that_cannot_be_opened_from_here_is_told_for_good(
    encoder: Encoder, loader: EmbeddingLoader, device: str, changed: str
) -> None:
    shared = taken(encoder.offer(1, 8))
    place = place_of(shared)
    other = {
        "kind": {"memory": "other"},
        "host": {"host": "another kernel's"},
        "memory": {"handle": bytes(64)} if device == "cuda" else {"offset": 8},
    }[changed]
    closed = msgspec.structs.replace(place, offer=msgspec.structs.replace(place.offer, **other))
    with pytest.raises(EmbeddingUnreachable):
        loader.load(share_place(DTYPE, shared.shape, msgspec.msgpack.encode(closed)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 2}, "format version 2"),
        ({"block_bytes": 4096}, "blocks of 4096 bytes"),
        ({"block_ids": (0, 1)}, "names 2 of 256 blocks"),
        ({"block_ids": (1 << 20,)}, "of 256"),
        (None, "can't be read"),
    ],
)
def test_another_layout_is_refused_before_it_is_read(
    encoder: Encoder, loader: EmbeddingLoader, changed: dict[str, Any] | None, said: str
) -> None:
    shared = taken(encoder.offer(1, 8))
    place = place_of(shared)
    wrong = b"\x01" if changed is None else msgspec.msgpack.encode(msgspec.structs.replace(place, **changed))
    with pytest.raises(ValueError, match=said):
        loader.load(share_place(DTYPE, shared.shape, wrong))
    assert arrives(loader, shared, 1)


def test_rows_of_another_dtype_are_refused_from_a_device_too(encoder: Encoder, device: str) -> None:
    narrow = EmbeddingLoader(torch.device(device), WIDTH, torch.float16)
    shared = taken(encoder.offer(1, 8))
    with pytest.raises(ValueError, match="it is bfloat16"):
        narrow.load(shared)
    bits = SharedTensor(shared.path, "float16", shared.shape)
    with pytest.raises(ValueError, match="expected float16"):
        narrow.load(bits)
    narrow.close()

"""Rows that stay where they were computed: for who asks so, while there is room, bit for bit the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_models import HIDDEN, ROWS, picture, save_llava

from trtx.ipc.encoder_messages import Encode, Encoded, EncoderArgs
from trtx.ipc.shared_tensor import SharedTensor, SharedTensorElsewhere, open_shared, remove_shared, share
from trtx.torch_engine.embeddings.device import DeviceArena
from trtx.torch_engine.runner.embeddings import EmbeddingLoader
from trtx.torch_engine.vision.encoder import Encoder
from trtx.torch_engine.vision.load import load_tower

CPU = torch.device("cpu")


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceArena]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = DeviceArena(2 << 16, CPU)  # of two blocks: an embedding of these has one
    yield made
    made.close()


def is_elsewhere(shared: SharedTensor) -> bool:
    try:
        open_shared(shared)
    except SharedTensorElsewhere:
        return True
    return False


def test_rows_stay_on_the_device_for_those_who_take_them_there(
    tmp_path_factory: pytest.TempPathFactory, arena: DeviceArena
) -> None:
    directory = tmp_path_factory.mktemp("llava")
    save_llava(directory)
    tower = load_tower(EncoderArgs(model=str(directory)))
    encoder = Encoder(tower, EncoderArgs(model=str(directory)), arena)
    asked = {0: True, 1: False, 2: True, 3: True}  # by item: whether its rows may stay; there is room for two
    for item, on_device in asked.items():
        assert encoder.submit(Encode(item, share(picture(item)), None, on_device)) is None
    answers: dict[int, Encoded] = {one.item_id: one for one in encoder.step()}
    rows = {item: answer.rows for item, answer in answers.items() if answer.rows is not None}
    assert {item: is_elsewhere(shared) for item, shared in rows.items()} == {0: True, 1: False, 2: True, 3: False}
    with torch.inference_mode():
        expected = tower.encode([tower.check(picture(item), None) for item in asked])
    loader = EmbeddingLoader(CPU, HIDDEN, torch.float32)
    for item, shared in rows.items():
        assert shared.shape == (ROWS, HIDDEN) and torch.equal(loader.load(shared).tensor, expected[item])
        remove_shared(shared)
    loader.close()
    assert len(arena) == 0


def test_an_encoder_without_an_arena_gives_files_to_everybody(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path_factory.mktemp("llava")
    save_llava(directory)
    args = EncoderArgs(model=str(directory))
    encoder = Encoder(load_tower(args), args)
    assert encoder.submit(Encode(1, share(picture(1)), None, on_device=True)) is None
    (answer,) = encoder.step()
    assert answer.rows is not None and not is_elsewhere(answer.rows)


def test_one_at_a_time_gives_the_same_bits_whoever_else_waits(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch rounds otherwise (benchmarks/encoder_batches.py): ``max_batch_size`` 1 is for those who mind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path_factory.mktemp("llava")
    save_llava(directory)
    args = EncoderArgs(model=str(directory), dtype="bfloat16", max_batch_size=1)
    tower = load_tower(args)

    def encoded(*seeds: int) -> dict[int, torch.Tensor]:
        encoder, found = Encoder(tower, args), {}
        for seed in seeds:
            encoder.submit(Encode(seed, share(picture(seed))))
        while not encoder.is_idle:
            for answer in encoder.step():
                assert answer.rows is not None
                found[answer.item_id] = open_shared(answer.rows)
        return found

    together = encoded(*range(9))
    for seed, rows in together.items():
        assert torch.equal(rows, encoded(seed)[seed])

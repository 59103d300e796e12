"""What waits for its reader is bounded, and ends once: read, or past its deadline."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtx.ipc.shared_tensor import SharedTensor, open_shared, remove_shared, share
from trtx.torch_engine.embeddings import (
    EmbeddingExports,
    EmbeddingGone,
    EmbeddingHandle,
    EmbeddingMismatch,
    EmbeddingReader,
    NoRoom,
)
from trtx.torch_engine.embeddings.arena import Blocks
from trtx.torch_engine.embeddings.handle import NixlEmbeddingOffer, parse_handle

WIDTH = 8
ROW_BYTES = WIDTH * 4
KEY = b"k" * 32


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def rows(count: int, value: float = 1.0) -> SharedTensor:
    return share(torch.full((count, WIDTH), value))


def read(handle: EmbeddingHandle, clock: Clock) -> torch.Tensor:
    taken = EmbeddingReader(clock=clock).read(handle, width=WIDTH, dtype="float32")
    found = open_shared(taken)
    remove_shared(taken)
    return found


def test_an_embedding_goes_to_its_one_reader_as_json(scratch: Path) -> None:
    clock = Clock()
    exports = EmbeddingExports(clock=clock)
    handle = exports.offer(KEY, rows(6, 2.5), (1, 2, 3))
    assert (exports.leases, exports.leased_bytes) == (1, 6 * ROW_BYTES)
    arrived = parse_handle(json.loads(json.dumps(handle.to_dict())))
    assert arrived == handle and (arrived.key, arrived.grid, arrived.tensor_size) == (KEY, (1, 2, 3), (6, WIDTH))
    assert read(arrived, clock).eq(2.5).all()
    with pytest.raises(EmbeddingGone, match="encode the image again"):
        read(arrived, clock)
    exports.sweep()
    assert (exports.leases, exports.leased_bytes, exports.expired) == (0, 0, 0)
    exports.close()
    assert not list(scratch.iterdir())


def test_what_nobody_reads_ends_at_its_deadline(scratch: Path) -> None:
    clock = Clock()
    exports = EmbeddingExports(clock=clock, lease_s=10)
    handle = exports.offer(KEY, rows(1), None)
    clock.now += 10.5
    exports.sweep()
    assert exports.leases == 1  # the two clocks may differ by a second
    with pytest.raises(EmbeddingGone, match="lease ended"):
        read(handle, clock)
    clock.now += 1
    exports.sweep()
    assert (exports.leases, exports.expired) == (0, 1)
    assert not list(scratch.iterdir())
    exports.close()


def test_what_was_read_is_seen_without_being_asked_for(scratch: Path) -> None:
    clock = Clock()
    exports = EmbeddingExports(clock=clock)
    read(exports.offer(KEY, rows(1), None), clock)
    exports._sweeper.join(0.01)
    for _ in range(200):
        if not exports.leases:
            break
        exports._sweeper.join(0.05)  # it goes on: this is a bounded wait
    assert exports.leases == 0
    exports.close()
    exports._sweeper.join(5)
    assert not exports._sweeper.is_alive()


def test_bytes_are_bounded_and_what_was_refused_is_removed(scratch: Path) -> None:
    exports = EmbeddingExports(max_bytes=10 * ROW_BYTES, clock=(clock := Clock()))
    handle = exports.offer(KEY, rows(6), None)
    with pytest.raises(NoRoom, match="192 of at most 320 bytes, and 160 more do not fit"):
        exports.offer(KEY, rows(5), None)
    assert len(list(scratch.iterdir())) == 1
    read(handle, clock)
    exports.offer(KEY, rows(10), None)  # makes room by itself
    exports.close()
    assert not list(scratch.iterdir())
    with pytest.raises(NoRoom):
        exports.offer(KEY, rows(1), None)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensor_size": [6, WIDTH + 1]}, "9 columns of float32; expected 8 of float32"),
        ({"dtype": "bfloat16"}, "8 columns of bfloat16"),
        ({"grid": [1, 2, 2]}, "6 rows of 8 and the grid"),
        ({"grid": [1, -2, -3]}, "6 rows of 8 and the grid"),
        ({"tensor_size": [0, WIDTH]}, "0 rows"),
        ({"version": 2}, "format version 2"),
        ({"dtype": "int8"}, "can't be read"),
        ({"key": 3}, "can't be read"),
        ({"tensor_size": [6]}, "can't be read"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_read(scratch: Path, changed: dict[str, Any], said: str) -> None:
    exports = EmbeddingExports(clock=(clock := Clock()))
    handle = exports.offer(KEY, rows(6), (1, 2, 3))
    with pytest.raises(EmbeddingMismatch, match=said):
        read(parse_handle(handle.to_dict() | changed), clock)
    assert read(handle, clock).shape == (6, WIDTH)
    exports.close()


def test_a_file_of_somewhere_else_stays_where_it_is(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = share(torch.zeros(6, WIDTH), tmp_path_factory.mktemp("elsewhere"))
    handle = EmbeddingHandle(tensor_size=(6, WIDTH), dtype="float32", key=KEY, deadline_s=2000.0, path=elsewhere.path)
    with pytest.raises(EmbeddingGone, match="is not a shared tensor of"):
        read(handle, Clock())
    other = scratch / "notes.txt"
    other.write_text("mine")
    for path in (other, scratch / "missing.tensor"):
        with pytest.raises(EmbeddingGone):
            read(
                EmbeddingHandle(tensor_size=(6, WIDTH), dtype="float32", key=KEY, deadline_s=2e3, path=str(path)),
                Clock(),
            )
    assert Path(elsewhere.path).exists() and other.read_text() == "mine"
    with pytest.raises(EmbeddingGone, match="neither a file nor an agent"):
        read(EmbeddingHandle(tensor_size=(6, WIDTH), dtype="float32", key=KEY, deadline_s=2e3), Clock())


@pytest.mark.parametrize(
    "changed", [{"block_ids": (0,)}, {"block_ids": (0, 4)}, {"block_ids": (0, -1)}, {"block_bytes": 0}]
)
def test_blocks_that_are_none_of_the_arena_are_refused(changed: dict[str, Any]) -> None:
    offer = {
        "agent_name": "a", "agent_metadata": b"m", "base_address": 1, "num_blocks": 4, "block_bytes": 100,
        "block_ids": (0, 3), "lease_id": 1,
    }  # fmt: skip
    handle = EmbeddingHandle(
        tensor_size=(6, WIDTH),
        dtype="float32",
        key=KEY,
        deadline_s=2e3,
        nixl=NixlEmbeddingOffer(**(offer | {"block_ids": (0, 3)})),
    )
    assert parse_handle(handle.to_dict()) == handle
    wrong = EmbeddingHandle(
        tensor_size=(6, WIDTH), dtype="float32", key=KEY, deadline_s=2e3, nixl=NixlEmbeddingOffer(**(offer | changed))
    )
    with pytest.raises(EmbeddingMismatch, match="blocks of"):
        parse_handle(wrong.to_dict())


class ExportsMachine(RuleBasedStateMachine):
    """Offers, reads and passing time: bytes are those of what can still be read, within the bound."""

    MAX_ROWS = 12

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.before, tempfile.tempdir = tempfile.tempdir, self.folder.name
        self.clock = Clock()
        self.exports = EmbeddingExports(max_bytes=self.MAX_ROWS * ROW_BYTES, lease_s=5, clock=self.clock)
        self.open: list[tuple[EmbeddingHandle, float]] = []
        self.ended: list[EmbeddingHandle] = []
        self.offered = 0

    @rule(count=st.integers(1, 6))
    def offer(self, count: int) -> None:
        self.offered += 1
        value = float(self.offered)
        held = sum(handle.nbytes for handle, _ in self.open)
        try:
            self.open.append((self.exports.offer(KEY, rows(count, value), None), value))
        except NoRoom:
            assert held + count * ROW_BYTES > self.MAX_ROWS * ROW_BYTES

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        handle, value = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.ended.append(handle)
        if handle.deadline_s > self.clock.now:
            assert read(handle, self.clock).eq(value).all()
        else:
            with pytest.raises(EmbeddingGone):
                read(handle, self.clock)
            self.open.append((handle, value))  # it stays until it is swept
            self.ended.pop()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def read_what_has_ended(self, data: st.DataObject) -> None:
        with pytest.raises(EmbeddingGone):
            read(data.draw(st.sampled_from(self.ended)), self.clock)

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.exports.sweep()
        late = [one for one in self.open if one[0].deadline_s + 1 <= self.clock.now]
        self.open = [one for one in self.open if one not in late]
        self.ended += [handle for handle, _ in late]

    @invariant()
    def nothing_is_lost_and_nothing_left(self) -> None:
        self.exports.sweep()
        assert self.exports.leases == len(self.open)
        assert self.exports.leased_bytes == sum(handle.nbytes for handle, _ in self.open) <= self.MAX_ROWS * ROW_BYTES
        assert {path.name for path in Path(self.folder.name).iterdir()} == {
            Path(h.path or "").name for h, _ in self.open
        }

    def teardown(self) -> None:
        self.exports.close()
        left = list(Path(self.folder.name).iterdir())
        tempfile.tempdir = self.before
        self.folder.cleanup()
        assert not left


ExportsMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
TestExports = ExportsMachine.TestCase


def test_every_block_is_free_or_taken_once() -> None:
    blocks = Blocks(5)
    first, second = blocks.take(2), blocks.take(3)
    assert first is not None and second is not None
    assert sorted(first + second) == list(range(5)) and blocks.take(1) is None and blocks.take(0) == ()
    blocks.give_back(first)
    assert blocks.num_free == 2
    with pytest.raises(KeyError):
        blocks.give_back(first)  # a block that were free twice would get two owners

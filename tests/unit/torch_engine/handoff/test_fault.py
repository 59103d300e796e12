"""The fault that tests plant in a handoff: what it does to which blocks, and that it is never on unseen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch import prepare
from trtx.launch.environment import child_environment
from trtx.torch_engine.handoff import FinishedRead, TransportEvents, codec
from trtx.torch_engine.handoff.fault import FaultyTransport
from trtx.torch_engine.kv_fault import VARIABLE, KvFault, parse_kv_fault
from trtx.torch_engine.kv_layout import KvGeometry

GEOMETRY = KvGeometry.uniform(num_kv_heads=2, num_layers=3, tokens_per_block=4, head_dim=8, dtype="float32")
OPAQUE = codec.encode(
    codec.ExportedKv(
        engine="prefill", num_blocks=9, geometry=GEOMETRY, lease_id=0, block_ids=b"", num_tokens=11, deadline_s=1e12
    )
)


class Reader:
    """A transport whose reads bring, into each local block, the number of the read."""

    name = "reader"
    pending_reads = 0

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._begun: list[Sequence[int]] = []
        self._polled = 0

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        self._begun.append(local_ids)
        return len(self._begun) - 1

    def poll(self) -> TransportEvents:
        finished = []
        for read_id in range(self._polled, len(self._begun)):
            with torch.inference_mode():
                self._pool[list(self._begun[read_id])] = float(read_id)
            finished.append(FinishedRead(read_id, 1, 0.1))
        self._polled = len(self._begun)
        return TransportEvents(finished=tuple(finished))


@pytest.mark.parametrize("text", ["", "swap-block", "swap-block:every=0,layer=0", "swap-block:every=9,layer=-1", "x"])
def test_a_value_that_is_none_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(UsageError, match="expected a value such as swap-block:every=100,layer=0"):
        parse_kv_fault(text)


def test_one_layer_of_one_block_of_each_so_many_handoffs_is_anothers(caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():  # as the runner makes it
        pool = torch.zeros(9, *GEOMETRY.block_shape)
    with caplog.at_level(logging.WARNING):
        faulty = FaultyTransport(Reader(pool), pool, GEOMETRY, parse_kv_fault("swap-block:every=3,layer=1"))  # type: ignore[arg-type]
        assert "KV IS CORRUPTED ON PURPOSE" in caplog.text
        told = []
        for read in range(3):
            faulty.begin_read(OPAQUE, range(2), (2 * read, 2 * read + 1))
            told += [one.is_corrupted for one in faulty.poll().finished]
        assert told == [False, False, True], "and it says of which"
    expected = torch.zeros_like(pool)
    for read in range(3):
        expected[2 * read : 2 * read + 2] = float(read)
    expected[4, :, 1] = 1.0  # the third read's first block, all heads, its second layer, from the second read's
    assert torch.equal(pool, expected)
    assert "layer 1 of block 4, of a prompt of 11 tokens" in caplog.text


def test_what_would_change_nothing_waits_for_the_next_handoff() -> None:
    pool = torch.zeros(9, *GEOMETRY.block_shape)
    reader = Reader(pool)
    faulty = FaultyTransport(reader, pool, GEOMETRY, KvFault(every=1, layer=0))  # type: ignore[arg-type]
    faulty.begin_read(OPAQUE, range(1), (0,))
    faulty.poll()
    assert torch.equal(pool, torch.zeros_like(pool)), "there is no other request's block yet"
    faulty.begin_read(OPAQUE, range(1), (1,))
    faulty.poll()
    assert pool[1, 0, 0].max() == 0.0 and pool[1, 0, 1].min() == 1.0


def test_a_layer_that_the_model_has_not_is_refused() -> None:
    pool = torch.zeros(9, *GEOMETRY.block_shape)
    with pytest.raises(UsageError, match="expected a layer below the model's 3"):
        FaultyTransport(Reader(pool), pool, GEOMETRY, KvFault(1, 3))  # type: ignore[arg-type]


def test_nothing_is_served_with_it_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "swap-block:every=100,layer=0")
    spec = TopologySpec.model_validate({"model": "synthetic:tiny", "port": 0})
    with pytest.raises(UsageError, match="corrupts KV on purpose to test `trtx eval parity`; unset it"):
        prepare(spec, run_dir=tmp_path)
    monkeypatch.setenv(VARIABLE, "what")
    with pytest.raises(UsageError, match="expected a value such as swap-block"):
        prepare(spec, run_dir=tmp_path, fault="what")
    assert VARIABLE not in child_environment({VARIABLE: "swap-block:every=100,layer=0"}, {})
    plan = prepare(spec, run_dir=tmp_path, fault="swap-block:every=100,layer=0")
    assert plan.workers[0].env[VARIABLE] == "swap-block:every=100,layer=0" and VARIABLE not in plan.processes[0].env
    assert plan.reasons[0].startswith("EVERY WORKER RUNS WITH A FAULT")

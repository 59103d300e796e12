"""The rows of ended requests: written off the event loop, bounded, and read by bench as they were meant."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trtx.bench.stage_rows import STAGES_FILE, WorkerRows, read_rows
from trtx.engine.api import EngineTimes
from trtx.errors import UsageError
from trtx.worker.requests import stage_log
from trtx.worker.requests.stage_clock import EndedRequest, StageClock
from trtx.worker.requests.stage_log import StageLog


def ended(name: str = "a", **values: float) -> EndedRequest:
    return EndedRequest(id=name, worker="agg-0", role="agg", outcome="stop", arrived_ns=1, ended_s=0.5, **values)


def written(log: StageLog, directory: Path) -> WorkerRows:
    log.close()
    found = read_rows(directory)
    assert found is not None
    return found


def test_bench_reads_what_a_worker_wrote(tmp_path: Path) -> None:
    log = StageLog(tmp_path / STAGES_FILE, "agg-0")
    log.put(ended("a", queue_s=0.25))
    log.put(ended("b"))

    found = written(log, tmp_path)

    assert [(row.id, row.queue_s, row.prefill_s) for row in found.requests] == [("a", 0.25, None), ("b", None, None)]
    assert {use.worker for use in found.uses} == {"agg-0"}
    assert all(use.cores >= 1 and use.cpu_s > 0 for use in found.uses)
    assert all(use.waited_s is not None and use.waited_s >= 0 for use in found.uses)


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_log, "LARGEST_BYTES", 200)
    monkeypatch.setattr(stage_log, "EVERY_SECONDS", 0.001)
    path = tmp_path / "agg-0.requests.jsonl"
    log = StageLog(path, "agg-0")
    for number in range(200):
        log.put(ended(str(number)))
        if number % 20 == 19:
            deadline = time.monotonic() + 10
            while not path.with_name(f"{path.name}.1").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
    log.close()

    assert {one.name for one in tmp_path.iterdir()} <= {path.name, f"{path.name}.1"}


def test_a_file_that_can_not_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StageLog(tmp_path / "gone" / "agg-0.requests.jsonl", "agg-0")
    for _ in range(3):
        log.put(ended())
    log.close()

    assert len([one for one in caplog.records if "can't be written" in one.message]) <= 1
    assert not (tmp_path / "gone").exists()


def test_the_queue_begins_when_the_worker_submits() -> None:
    """An engine takes new requests between two steps, so a request waits before the engine counts it as arrived."""
    clock = StageClock("a", time.monotonic_ns(), None)
    clock.submitted(8)
    clock.engine = EngineTimes(arrived_s=time.monotonic() + 0.5, queue_s=0.1, prefill_s=0.2)

    row = clock.row("agg-0", "agg", "stop")

    assert row.queue_s == pytest.approx(0.6, abs=0.05)
    assert row.token_s == pytest.approx(0.8, abs=0.05)


def test_what_the_engine_does_not_report_is_absent() -> None:
    clock = StageClock("a", time.monotonic_ns(), None)

    row = clock.row("agg-0", "agg", "cancelled")

    assert (row.queue_s, row.token_s, row.media_s, row.first_chunk_s, row.tokens) == (None,) * 5


def test_a_cut_row_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / STAGES_FILE).write_text('{"worker":"agg-0","at_ns":1,"cores":1,"cpu_s":1}\n{"id":"a"\n')

    with pytest.raises(UsageError, match=rf"{STAGES_FILE} line 2 is not a row of a worker"):
        read_rows(tmp_path)


def test_a_row_of_a_later_version_is_read(tmp_path: Path) -> None:
    line = '{"id":"a","worker":"w","role":"agg","outcome":"stop","arrived_ns":1,"added_later":{}}'
    (tmp_path / STAGES_FILE).write_text(f"{line}\n")

    found = read_rows(tmp_path)

    assert found is not None and found.requests[0].id == "a"

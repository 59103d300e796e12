"""The status file is whole at every moment and tells the launcher what it needs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from trtx.engine.ranks import Rank
from trtx.worker.status import StatusFile


def test_a_status_file_says_who_and_how_far(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    status = StatusFile(path)
    assert json.loads(path.read_text())["state"] == "loading"
    status.update(state="serving", worker_id=2**63 + 1, engine_pid=42, kv_blocks=7, ranks=(Rank(42, 99),))
    written = json.loads(path.read_text())
    assert written == {
        "pid": os.getpid(),
        "state": "serving",
        "engine_pid": 42,
        "worker_id": 2**63 + 1,
        "device_memory_bytes": None,
        "kv_blocks": 7,
        "load_seconds": None,
        "ranks": [{"pid": 42, "started": 99}],
        "error": None,
        "handoffs": None,
        "schema": 1,
    }
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_path_nothing_is_written() -> None:
    status = StatusFile(None)
    status.update(state="draining")
    assert status.status.state == "draining"


def test_a_file_that_cannot_be_written_or_was_removed_ends_nothing_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "status" / "agg-0.json"
    status = StatusFile(path)  # its directory is not there yet
    status.update(state="serving")
    assert [record.getMessage() for record in caplog.records] == [
        f"the status file {path} can't be written (No such file or directory)"
    ]
    path.parent.mkdir()
    status.keep()
    assert json.loads(path.read_text())["state"] == "serving"
    path.unlink()
    status.keep()
    assert path.exists()
    assert list(path.parent.iterdir()) == [path]


def test_what_a_file_says_goes_when_it_no_longer_holds_and_cannot_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agg-0.json"
    status = StatusFile(path)
    in_the_way = tmp_path / f".agg-0.json.{os.getpid()}"
    in_the_way.mkdir()
    status.update(state="serving", worker_id=5)
    assert not path.exists()  # "loading" would be taken for what holds, by whoever must know its records
    in_the_way.rmdir()
    status.keep()
    assert json.loads(path.read_text())["worker_id"] == 5


def test_a_directory_that_cannot_be_entered_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "status" / "agg-0.json"
    path.parent.mkdir()
    status = StatusFile(path)
    shutil.rmtree(path.parent)
    path.parent.symlink_to("status")  # into itself, for root may enter what was closed
    status.keep()
    path.parent.unlink()
    path.parent.mkdir()
    status.keep()
    assert path.exists()

"""The status file is whole at every moment and tells the launcher what it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
        "device_memory_bytes": 0,
        "kv_blocks": 7,
        "load_seconds": None,
        "ranks": [{"pid": 42, "started": 99}],
        "error": None,
    }
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_path_nothing_is_written() -> None:
    status = StatusFile(None)
    status.update(state="draining")
    assert status.status.state == "draining"

"""A worker's status is one dataclass: what one process writes, the other reads, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtx.engine.ranks import Rank
from trtx.engine.worker_status import HandoffsSoFar, State, WorkerStatus, read, to_json
from trtx.errors import LaunchError

NUMBER = st.none() | st.integers(0, 2**64 - 1)
STATUSES = st.builds(
    WorkerStatus,
    pid=st.integers(1, 2**22),
    state=st.sampled_from(get_args(State)),
    engine_pid=NUMBER,
    worker_id=NUMBER,
    device_memory_bytes=NUMBER,
    kv_blocks=NUMBER,
    load_seconds=st.none() | st.floats(0, 1e6),
    ranks=st.lists(st.builds(Rank, pid=st.integers(1, 2**22), started=st.integers(0, 2**40)), max_size=3).map(tuple),
    error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    handoffs=st.none() | st.builds(HandoffsSoFar, *[st.integers(0, 2**40)] * 3, because=st.just("it is gone")),
)
WRONG: dict[str, Any] = {  # of each field, a value of another type
    "pid": "7",
    "state": "dozing",
    "engine_pid": 1.5,
    "worker_id": "ab",
    "device_memory_bytes": [],
    "kv_blocks": "many",
    "load_seconds": "2 s",
    "ranks": [{"pid": 7}],
    "error": 5,
    "handoffs": {"read": "some"},
    "schema": 2,
}


@settings(
    max_examples=examples(50),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(status=STATUSES)
def test_what_is_written_is_what_is_read(tmp_path: Path, status: WorkerStatus) -> None:
    path = tmp_path / "agg-0.json"
    path.write_bytes(to_json(status))
    assert read(path, status.pid) == status
    assert read(path, status.pid + 1) is None, "an older process's"
    assert json.loads(path.read_text()).keys() == {field.name for field in dataclasses.fields(WorkerStatus)}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WorkerStatus)])
def test_a_field_of_another_type_is_told_with_file_and_field(tmp_path: Path, field: str) -> None:
    assert field in WRONG, f"add a value that {field} can't have to WRONG"
    path = tmp_path / "agg-0.json"
    path.write_text(json.dumps(json.loads(to_json(WorkerStatus(7))) | {field: WRONG[field]}))
    with pytest.raises(LaunchError, match=rf"agg-0\.json is not a status of a worker .*\$\.{field}") as told:
        read(path, 7)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": "serving"}'])
def test_what_is_no_status_at_all_is_told_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agg-0.json"
    path.write_text(text)
    with pytest.raises(LaunchError, match=r"agg-0\.json is not a status of a worker"):
        read(path, 7)


def test_a_worker_that_has_written_nothing_has_no_status(tmp_path: Path) -> None:
    assert read(tmp_path / "absent.json", 7) is None
    assert read(None, 7) is None

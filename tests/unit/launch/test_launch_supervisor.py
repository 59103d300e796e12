"""Scripted histories: what the supervisor does, second by second, on a clock that the test moves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch_builders import plan_of, process

from trtx.engine.ranks import descendants
from trtx.launch.events import Event
from trtx.launch.logs import Log
from trtx.launch.restarts import RestartPolicy
from trtx.launch.supervisor import Supervisor
from trtx.topology import ProcessSpec


@dataclass
class ScriptedChild:
    pid: int
    log: Log
    code: int | None = None
    signals: list[str] = field(default_factory=list)
    exit_fd: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.signals.append("term")

    def kill_group(self) -> None:
        self.signals.append("kill")
        if self.code is None:
            self.code = -9


class History:
    """A supervisor over one scripted worker; time passes only in :meth:`run`."""

    def __init__(self, tmp_path: Path, *names: str) -> None:
        self.now = 1000.0
        self.children: dict[str, list[ScriptedChild]] = {}
        self.events: list[Event] = []
        self.plan = plan_of(tmp_path, *(process(tmp_path, name) for name in names or ("agg-0",)))
        self.supervise()

    def supervise(self, **more: Any) -> None:
        """Starts the processes of the plan; those of an earlier plan are forgotten."""
        self.children.clear()
        self.supervisor = Supervisor(self.plan, self.events.append, spawn=self._spawn, clock=lambda: self.now, **more)
        for slot in self.supervisor.slots:
            self.supervisor._start(slot)

    def _spawn(self, spec: ProcessSpec) -> ScriptedChild:
        lives = self.children.setdefault(spec.name, [])
        lives.append(ScriptedChild(pid=1000 * (1 + len(self.children)) + len(lives), log=Log(spec.log_path)))
        return lives[-1]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.supervisor.step()

    def serve(self, name: str = "agg-0", worker_id: int = 0xAB) -> None:
        """The worker registers and says that it serves."""
        child = self.children[name][-1]
        spec = next(one for one in self.plan.processes if one.name == name)
        assert spec.status_file is not None
        spec.status_file.write_text(json.dumps({"pid": child.pid, "state": "serving", "worker_id": worker_id}))
        self.register(worker_id)

    def register(self, worker_id: int, port: int = 5, *, host: str = "127.0.0.1", component: str = "backend") -> None:
        for bucket in ("instances", "mdc"):
            path = self.plan.discovery_dir / "v1" / bucket / f"ns%2Fbackend%2Fgenerate%2F{worker_id:x}"
            path.parent.mkdir(parents=True, exist_ok=True)
            transport = {"tcp": f"{host}:{port}/x/generate"}
            record = {"instance_id": worker_id, "component": component, "endpoint": "generate", "transport": transport}
            path.write_text(json.dumps(record))
        self.run(0.5)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def records(self) -> list[Path]:
        return [path for path in self.plan.discovery_dir.rglob("*") if path.is_file()]


def test_a_death_removes_the_records_at_once_and_is_answered_with_a_restart_after_a_second(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    history.plan.workers[0].log_path.write_text("first line\nCUDA error: out of memory\n")
    history.children["agg-0"][0].code = -9
    history.run(0.05)
    assert history.records() == []
    died = next(event for event in history.events if event.kind == "exited")
    for words in ("agg-0", "SIGKILL", str(history.plan.workers[0].log_path), "CUDA error: out of memory"):
        assert words in died.message
    history.run(0.8)
    assert len(history.children["agg-0"]) == 1
    history.run(0.3)
    assert len(history.children["agg-0"]) == 2
    (restart,) = history.supervisor.restarts
    assert (restart.name, restart.exit) == ("agg-0", "was killed by SIGKILL")
    assert not history.supervisor.is_whole
    history.serve(worker_id=0xCD)
    assert history.supervisor.is_whole
    assert history.kinds()[-1] == "recovered"


def test_processes_of_a_dead_workers_engine_are_ended_by_what_it_recorded(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    # A rank that left its worker's session, and a process that has the pid of one that is gone.
    rank, stranger = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2))
    try:
        started = {found.pid: found.started for found in descendants(os.getpid())}
        path = history.plan.workers[0].status_file
        assert path is not None
        recorded = json.loads(path.read_text()) | {
            "ranks": [
                {"pid": rank.pid, "started": started[rank.pid]},
                {"pid": stranger.pid, "started": started[stranger.pid] - 1},
            ]
        }
        path.write_text(json.dumps(recorded))
        history.children["agg-0"][0].code = 4
        history.run(0.05)
        assert rank.wait(10) == -signal.SIGKILL
        assert stranger.poll() is None
        died = next(event for event in history.events if event.kind == "exited")
        assert f"processes of its engine outlived it, and trtx ended them: pid {rank.pid}" in died.message
    finally:
        for process in (rank, stranger):
            process.kill()
            process.wait()


def test_prompts_that_were_computed_a_second_time_are_told_at_the_first_and_whenever_there_are_twice_as_many(
    tmp_path: Path,
) -> None:
    history = History(tmp_path, "decode-0")
    history.serve("decode-0")
    path, pid = history.plan.workers[0].status_file, history.children["decode-0"][0].pid
    assert path is not None
    told: list[str] = []
    for recomputed in (0, 1, 1, 3, 4, 5):
        handoffs = {
            "read": 80,
            "recomputed": recomputed,
            "whole": 0,
            "recomputed_from": "prefill-1",
            "because": "no way",
        }
        path.write_text(json.dumps({"pid": pid, "state": "serving", "worker_id": 0xAB, "handoffs": handoffs}))
        history.run(0.5)
        told = [event.message for event in history.events if event.kind == "recomputed"]
    assert len(told) == 2
    assert told[0] == (
        "decode-0 recomputed 1 of 81 prompts, because their KV did not come from a prefill worker; the last one "
        "was from prefill-1: no way"
    )
    assert told[1].startswith("decode-0 recomputed 3 of 83 prompts")


def test_the_records_of_the_others_stay(tmp_path: Path) -> None:
    history = History(tmp_path, "agg-0", "agg-1")
    history.serve("agg-0", 0xAB)
    history.serve("agg-1", 0xCD)
    history.supervisor.mark_ready()
    history.children["agg-0"][0].code = 1
    history.run(0.05)
    assert {path.name.rpartition("%2F")[2] for path in history.records()} == {"cd"}


def test_an_event_source_that_names_the_worker_only_inside_goes_too(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    source = history.plan.discovery_dir / "v1" / "event_sources" / "topic%2Fkv%2Devents%2F77"
    source.parent.mkdir()
    source.write_text(json.dumps({"type": "EventSource", "metadata": {"worker": {"worker_id": 0xAB, "dp_rank": 0}}}))
    history.supervisor.mark_ready()
    history.children["agg-0"][0].code = 1
    history.run(0.05)
    assert history.records() == []


def test_exit_zero_while_serving_is_a_death_too(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    history.children["agg-0"][0].code = 0
    history.run(1.2)
    assert "exited 0" in history.supervisor.restarts[0].exit
    assert len(history.children["agg-0"]) == 2


def test_a_death_before_the_topology_was_ready_ends_the_launch(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.children["agg-0"][0].code = 3
    history.run(5)
    assert history.supervisor.failure is not None
    assert "agg-0 exited 3" in history.supervisor.failure
    assert len(history.children["agg-0"]) == 1


def test_five_deaths_within_a_minute_are_a_crash_loop(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.supervisor.mark_ready()
    for life in range(1, 6):
        history.serve(worker_id=life)
        history.children["agg-0"][-1].code = 1
        history.run(10)
    assert len(history.children["agg-0"]) == 5
    waits = [event.message.partition(" in ")[2] for event in history.events if event.kind == "restarting"]
    assert waits == ["1 s", "2 s", "4 s", "8 s"]
    assert history.supervisor.failure is not None
    assert "died 5 times" in history.supervisor.failure
    assert history.kinds()[-1] == "gave-up"


def test_a_worker_whose_records_vanished_is_restarted_and_one_that_blinks_is_not(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    for path in history.records():
        path.unlink()
    history.run(1)
    history.serve()
    history.run(5)
    assert len(history.children["agg-0"]) == 1
    for path in history.records():
        path.unlink()
    history.run(5)
    assert history.children["agg-0"][0].signals[0] == "kill"
    assert "vanished" in history.kinds()
    assert len(history.children["agg-0"]) == 2


def test_a_worker_whose_generate_endpoint_is_not_registered_yet_does_not_serve(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    (record,) = (path for path in history.records() if path.parent.name == "instances")
    early = json.loads(record.read_text()) | {"endpoint": "worker_kv_query_source_1"}
    again = History(tmp_path)
    record.write_text(json.dumps(early))
    again.run(3)
    assert [slot.state for slot in again.supervisor.slots] == ["loading"]


def test_a_status_file_of_an_earlier_life_does_not_count(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    history.children["agg-0"][0].code = 1
    history.run(2)
    assert [slot.state for slot in history.supervisor.slots] == ["starting"]


@pytest.mark.parametrize(
    ("times", "served", "expected"),
    [
        ([0, 1, 2, 3, 4], True, [1.0, 2.0, 4.0, 8.0, None]),
        ([0, 100, 200, 300, 400], True, [1.0] * 5),
        ([0, 100, 200, 300, 400], False, [1.0, 2.0, 4.0, 8.0, None]),
        ([0, 20, 40, 60, 80], True, [1.0, 2.0, 4.0, 4.0, 4.0]),
    ],
)
def test_back_off_follows_the_deaths_of_the_last_minute(
    times: list[int], served: bool, expected: list[float | None]
) -> None:
    policy = RestartPolicy()
    assert [policy.record_death(at, had_served=served) for at in times] == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_breaks_is_a_failure_of_the_topology_and_no_silence(tmp_path: Path) -> None:
    class Broken(ScriptedChild):
        def poll(self) -> int | None:
            raise OSError("no more file descriptors")

    plan = plan_of(tmp_path, process(tmp_path, "agg-0"))
    supervisor = Supervisor(plan, lambda event: None, spawn=lambda spec: Broken(1000, Log(spec.log_path)))
    supervisor.start()
    deadline = time.monotonic() + 10
    while supervisor.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    supervisor.end_watch()
    assert supervisor.failure is not None
    assert "no more file descriptors" in supervisor.failure


def test_a_worker_that_sleeps_is_no_lost_worker_and_is_up_again_once_it_is_awake(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    child = history.children["agg-0"][-1]
    status = history.plan.workers[0].status_file
    assert status is not None
    status.write_text(json.dumps({"pid": child.pid, "state": "asleep", "worker_id": 0xAB}))
    for record in history.records():
        record.unlink()
    history.run(60)
    assert history.kinds()[-1] == "asleep" and child.signals == []
    assert not history.supervisor.is_whole
    history.serve()
    assert history.supervisor.is_whole
    assert (history.events[-1].kind, history.events[-1].message) == ("up", "agg-0 is awake, and back in routing")
    assert history.kinds().count("up") == 2 and "recovered" not in history.kinds()


def test_a_worker_that_dies_in_its_sleep_is_started_again(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    status = history.plan.workers[0].status_file
    assert status is not None
    pid = history.children["agg-0"][-1].pid
    status.write_text(json.dumps({"pid": pid, "state": "asleep", "worker_id": 0xAB}))
    history.run(1)
    history.children["agg-0"][-1].code = -9
    history.run(2)
    assert len(history.children["agg-0"]) == 2
    history.serve(worker_id=0xCD)
    assert history.supervisor.is_whole

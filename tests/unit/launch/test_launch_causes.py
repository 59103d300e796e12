"""What the watch tells as a cause is something that it looked at; what it calls whole answered a request."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launch_builders import plan_of, process
from test_launch_supervisor import History, ScriptedChild

from trtx.launch.events import Event
from trtx.launch.frontend_watch import SILENT_FRONTEND_S, STOPPED_FRONTEND_S, UNROUTED_S
from trtx.launch.logs import Log
from trtx.launch.route import FrontendStatus
from trtx.launch.scratch import Scratch
from trtx.launch.supervisor import Supervisor
from trtx.topology import ProcessSpec

pytestmark = pytest.mark.slow


class Served(History):
    """A history with a frontend, a held directory, and a route whose answers the test gives."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        frontend = process(tmp_path, "frontend", role="frontend")
        self.plan = plan_of(tmp_path, frontend, *self.plan.processes)
        self.scratch = Scratch(self.plan.scratch_dir, self.plan.discovery_dir)
        self.scratch.make()
        self.route = FrontendStatus(self.plan)
        self.supervise(routes={"frontend": self.route}, scratch=self.scratch)

    answers = routes = proves = True  # what the frontend does

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            if self.supervisor.slots[0].state == "starting":
                self.supervisor.slots[0].state = "up"  # its port: tests/integration
                self.supervisor.slots[0].up_since = self.now
            if self.answers:
                self.route.answered_at = self.now
                self.route.routed_at = self.now if self.routes else self.route.routed_at
                self.route.proved_at = self.now if self.proves else self.route.proved_at
            super().run(0.25)

    def told(self, kind: str) -> str:
        return "\n".join(event.message for event in self.events if event.kind == kind)

    def ready(self) -> None:
        self.serve()
        self.supervisor.mark_ready()
        self.run(1)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    history = Served(tmp_path)
    yield history
    history.scratch.remove()


def test_a_removed_directory_is_the_cause_that_is_told_and_everything_starts_again(served: Served) -> None:
    served.ready()
    shutil.rmtree(served.plan.scratch_dir)
    served.run(2)
    assert f"{served.plan.scratch_dir} was removed by something other than trtx" in served.told("lost")
    died = served.told("exited")
    assert f"agg-0 was killed by trtx after 2 s, because {served.plan.scratch_dir} was removed" in died
    assert "frozen" not in died + served.told("vanished")
    assert [len(served.children[name]) for name in ("frontend", "agg-0")] == [2, 2]
    assert served.scratch.problem() is None
    assert "recovered" not in served.kinds()
    served.serve(worker_id=0xCD)
    served.run(1)
    assert served.kinds()[-1] == "recovered"


def test_a_directory_that_is_removed_again_and_again_ends_the_topology(served: Served) -> None:
    served.ready()
    for life in range(1, 6):
        shutil.rmtree(served.plan.scratch_dir)
        served.run(10)
        if served.supervisor.failure is None:
            served.serve(worker_id=life)
    assert "died 5 times" in str(served.supervisor.failure)
    assert "was removed by something other than trtx" in str(served.supervisor.failure)


def test_a_directory_removed_while_it_starts_ends_the_launch_with_that_cause(served: Served) -> None:
    shutil.rmtree(served.plan.scratch_dir)
    served.run(1)
    assert "was removed by something other than trtx while the topology started" in str(served.supervisor.failure)


def test_whole_again_is_told_only_after_a_request_went_through(served: Served) -> None:
    served.ready()
    served.proves = False
    served.children["agg-0"][0].code = -9
    served.run(2)
    served.serve(worker_id=0xCD)
    served.run(3)
    assert served.supervisor.is_whole
    assert "recovered" not in served.kinds()
    served.route.request_problem = "HTTP 500: no instances"
    served.run(3)
    assert served.told("unproved") == "every process is up again, but a request fails: HTTP 500: no instances"
    served.proves = True
    served.run(1)
    assert served.kinds()[-1] == "recovered"


def test_a_frontend_that_does_not_count_the_workers_is_started_again(served: Served) -> None:
    served.ready()
    served.route.problem = "0 of 1 agg"
    served.routes = False
    served.run(UNROUTED_S - 2)
    assert len(served.children["frontend"]) == 1
    served.run(5)
    assert "frontend (pid" in served.told("vanished")
    assert "it does not count every registered worker (0 of 1 agg)" in served.told("vanished")
    assert len(served.children["frontend"]) == 2


def test_a_frontend_that_refuses_the_model_ends_the_launch_with_its_sentence(served: Served) -> None:
    line = 'x WARN w: Model materialization failed; scheduling retry attempt=1 error="syntax error: in default:1"\n'
    (served.plan.processes[0].log_path).write_text(line)
    served.run(1)
    assert "the frontend can't serve tiny: syntax error: in default:1; correct" in str(served.supervisor.failure)
    assert str(served.plan.model_path) in str(served.supervisor.failure)


@pytest.mark.parametrize(("seconds", "is_stopped"), [(STOPPED_FRONTEND_S, True), (SILENT_FRONTEND_S, False)])
def test_a_frontend_that_answers_nobody_is_started_again(served: Served, seconds: float, is_stopped: bool) -> None:
    served.ready()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as sleeper:
        try:
            if is_stopped:
                os.kill(sleeper.pid, signal.SIGSTOP)
                os.waitpid(sleeper.pid, os.WUNTRACED)
            served.children["frontend"][0].pid = sleeper.pid
            served.answers = False
            served.run(seconds - 3)
            assert len(served.children["frontend"]) == 1
            served.run(6)
        finally:
            sleeper.kill()
    assert "it has not answered for" in served.told("vanished")
    assert ("it is stopped (by SIGSTOP or a debugger)" in served.told("vanished")) == is_stopped
    assert len(served.children["frontend"]) == 2


def test_a_frontend_that_waited_long_for_its_workers_is_not_silent_before_it_is_asked(served: Served) -> None:
    served.answers = False  # nobody asks while workers load
    served.run(SILENT_FRONTEND_S + 15)
    served.serve()
    served.supervisor.mark_ready()
    served.run(1)
    served.answers = True
    served.run(5)
    assert served.told("vanished") == "" and len(served.children["frontend"]) == 1


@pytest.mark.parametrize(
    ("age_s", "cause"),
    [
        (2, "2 s after it renewed them, and this trtx did not delete them"),
        (11, "it had not renewed them for 11 s: it was fr"),
    ],
)
def test_why_records_are_gone_is_told_by_when_they_were_renewed(tmp_path: Path, age_s: int, cause: str) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    for path in history.records():
        os.utime(path, (time.time() - age_s,) * 2)
    history.run(0.5)
    for path in history.records():
        path.unlink()
    history.run(3)
    assert cause in history.events[-3].message
    assert [event.kind for event in history.events][-3:] == ["vanished", "exited", "restarting"]


def test_a_worker_that_was_told_to_stop_may_finish_what_it_has_begun(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    path = history.plan.workers[0].status_file
    assert path is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "draining", "error": "the engine died: why"}))
    for record in history.records():
        record.unlink()
    history.run(60)
    assert history.children["agg-0"][0].signals == []
    history.children["agg-0"][0].code = 4
    history.run(0.5)
    died = next(event.message for event in history.events if event.kind == "exited")
    assert "agg-0 exited 4" in died
    assert "its status file says: the engine died: why" in died


def test_a_worker_whose_status_file_cannot_be_written_is_known_by_its_port(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    assert history.supervisor.is_whole
    path = history.plan.workers[0].status_file
    assert path is not None
    path.unlink()
    history.run(1)
    assert history.supervisor.is_whole
    assert history.supervisor.slots[0].status is not None


def test_a_status_file_that_cannot_be_read_is_told_once_with_its_field_and_what_it_said_before_holds(
    tmp_path: Path,
) -> None:
    history = History(tmp_path)
    history.serve()
    path = history.plan.workers[0].status_file
    assert path is not None
    whole = json.loads(path.read_text())
    for wrong, words in (({"kv_blocks": "many"}, "`$.kv_blocks`"), ({"schema": 2}, "`$.schema`")):
        path.write_text(json.dumps(whole | wrong))
        history.run(2)
        told = [event.message for event in history.events if event.kind == "lost"]
        assert len([one for one in told if str(path) in one and words in one]) == 1
        assert all(len(one) < 1000 for one in told)
        assert history.supervisor.is_whole
        assert history.supervisor.slots[0].status is not None
    path.write_text(json.dumps(whole | {"kv_blocks": 7}))
    history.run(1)
    assert history.supervisor.slots[0].status.kv_blocks == 7


def test_a_worker_whose_status_stopped_at_loading_is_known_by_its_port_and_its_records_go_with_it(
    tmp_path: Path,
) -> None:
    history = History(tmp_path)
    path = history.plan.workers[0].status_file
    assert path is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        history.children["agg-0"][0].pid = os.getpid()
        path.write_text(json.dumps({"pid": os.getpid(), "state": "loading"}))  # the last that the disk had room for
        history.register(0xAB, port=listener.getsockname()[1])
    assert history.supervisor.is_whole
    history.supervisor.mark_ready()
    history.children["agg-0"][0].code = -9
    history.children["agg-0"][0].kill_group = lambda: None  # type: ignore[method-assign]
    history.run(0.1)
    assert history.records() == []


def test_a_process_that_could_not_register_waits_for_room_and_the_others_serve_on(served: Served) -> None:
    served.ready()
    in_the_way = served.plan.scratch_dir / f".room.{os.getpid()}"
    in_the_way.mkdir()  # no byte can be written there, by root either
    served.children["agg-0"][0].code = -9
    served.run(90)
    assert served.supervisor.failure is None
    assert [len(served.children[name]) for name in ("frontend", "agg-0")] == [1, 1]
    why = f"agg-0 is not started yet: {served.plan.scratch_dir} can't be written (Is a directory), where it has to"
    assert served.told("held-back").startswith(why)
    assert served.kinds().count("held-back") == 1
    in_the_way.rmdir()
    served.run(2)
    assert len(served.children["agg-0"]) == 2
    served.serve(worker_id=0xCD)
    served.run(1)
    assert served.kinds()[-1] == "recovered"


def test_a_process_waits_for_the_files_that_it_starts_with(served: Served) -> None:
    served.ready()
    path = served.plan.run_dir / "plan.json"
    path.unlink()
    path.symlink_to("plan.json")  # into itself: there, and not to be read, by root either
    served.children["agg-0"][0].code = -9
    served.run(90)
    assert served.supervisor.failure is None
    assert len(served.children["agg-0"]) == 1
    assert served.told("held-back").startswith(f"agg-0 is not started yet: {path} can't be read (Too many levels")
    path.unlink()
    served.run(2)
    assert len(served.children["agg-0"]) == 2


def test_a_start_that_fails_while_it_serves_is_tried_again(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.serve()
    history.supervisor.mark_ready()
    spawn, failures = history.supervisor._spawn, iter([OSError(11, "Resource temporarily unavailable")])

    def fails_once(spec: ProcessSpec) -> ScriptedChild:
        for failure in failures:
            raise failure
        return spawn(spec)  # type: ignore[return-value]

    history.supervisor._spawn = fails_once
    history.children["agg-0"][0].code = -9
    history.run(4)
    assert len(history.children["agg-0"]) == 2
    assert "agg-0 can't be started: [Errno 11] Resource temporarily unavailable" in history.events[-3].message


def test_a_listener_that_raises_does_not_end_the_watch(tmp_path: Path) -> None:
    heard: list[str] = []

    def raises(event: Event) -> None:
        heard.append(event.kind)
        raise OSError(28, "No space left on device")

    plan = plan_of(tmp_path, process(tmp_path, "agg-0"))
    now = [0.0]
    lives: list[ScriptedChild] = []

    def spawn(spec: ProcessSpec) -> ScriptedChild:
        lives.append(ScriptedChild(1000, Log(spec.log_path)))
        return lives[-1]

    supervisor = Supervisor(plan, raises, spawn=spawn, clock=lambda: now[0])
    supervisor._start(supervisor.slots[0])
    supervisor.mark_ready()
    lives[0].code = 1
    for _ in range(60):
        now[0] += 0.05
        supervisor.step()
    assert supervisor.failure is None
    assert heard == ["starting", "exited", "restarting", "starting"]


def test_a_frontend_whose_port_was_taken_says_by_whom(served: Served) -> None:
    served.ready()
    served.children["frontend"][0].code = -9
    served.run(0.25)
    with socket.socket() as thief:
        thief.bind((served.plan.host, served.plan.port))
        thief.listen()
        served.run(1)
        served.supervisor.slots[0].had_served = False
        served.children["frontend"][1].code = 1
        served.run(0.25)
    (_, died) = (event.message for event in served.events if event.kind == "exited")
    by = f"port {served.plan.port} on 127.0.0.1 is in use by {psutil.Process().name()} (pid {os.getpid()})"
    assert f"before it was up: {by}, which it needs" in died

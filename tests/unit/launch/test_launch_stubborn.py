"""Six real children that do not behave. After each, no process is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_builders import plan_of, process

from trtx.errors import LaunchError
from trtx.launch import serve
from trtx.launch.events import Event
from trtx.launch.interruption import Interruption
from trtx.launch.processes import members
from trtx.launch.served import Timeouts
from trtx.launch.stopping import Ending, deadlines, stop
from trtx.launch.supervisor import Supervisor
from trtx.topology import Plan

pytestmark = pytest.mark.slow

SLEEP = "import time; time.sleep(600)"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n" + SLEEP
)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert members(plan_of(tmp_path).marker, ()) == set()
    assert not (tmp_path / "scratch").exists()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def watched(plan: Plan, events: list[Event]) -> Supervisor:
    supervisor = Supervisor(plan, events.append)
    supervisor.start()
    return supervisor


def end(plan: Plan, supervisor: Supervisor, deadline_s: float = 1.0) -> dict[str, Ending]:
    supervisor.end_watch()
    return stop(plan, supervisor.slots, supervisor.sessions, deadline_s=deadline_s, hurry=lambda: False)


def test_one_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", IGNORES_SIGTERM), process(tmp_path, "agg-1", SLEEP))
    supervisor = watched(plan, [])
    wait_until(lambda: "deaf" in plan.workers[0].log_path.read_text())
    assert end(plan, supervisor) == {"agg-0": "forced", "agg-1": "clean"}


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([0, 2, 0, 1], [24, 28, 28, 32]),  # aggregated: no stage waits for one that has nobody
        ([1, 1, 0, 1], [24, 28, 28, 32]),
        ([2, 1, 1, 1], [20, 24, 28, 32]),
        ([0, 1, 0, 0], [28, 32, 32, 32]),  # of a host without the frontend
    ],
)
def test_answers_have_nearly_all_of_the_deadline_to_end(processes: list[int], expected: list[float]) -> None:
    assert deadlines(processes, 32.0) == expected


def test_one_that_exits_before_ready_ends_the_launch_with_its_last_words(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", "print('no such weights'); raise SystemExit(3)"))
    with pytest.raises(LaunchError) as failed, serve(plan, on_event=lambda event: None):
        pytest.fail("it never became ready")
    for words in ("agg-0 exited 3", "before it was up", "agg-0.log", "no such weights"):
        assert words in str(failed.value)


def test_one_that_never_becomes_ready_runs_into_the_deadline(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", SLEEP))
    timeouts = Timeouts(ready_s=0.5)
    with (
        pytest.raises(LaunchError, match="not ready in time"),
        serve(plan, on_event=lambda event: None, timeouts=timeouts),
    ):
        pytest.fail("it never became ready")


def test_one_that_exits_zero_while_serving_is_started_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", "import time; time.sleep(0.3)"))
    supervisor = watched(plan, [])
    supervisor.mark_ready()
    wait_until(lambda: len(supervisor.sessions) == 2)
    assert [restart.exit for restart in supervisor.restarts][:1] == ["exited 0"]
    end(plan, supervisor)


def test_a_grandchild_in_a_session_of_its_own_dies_too(tmp_path: Path) -> None:
    grandchild = f"""
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", {IGNORES_SIGTERM!r}], start_new_session=True).pid, flush=True)
        {SLEEP}
    """
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", grandchild))
    supervisor = watched(plan, [])
    log = plan.workers[0].log_path
    wait_until(lambda: log.exists() and "deaf" in log.read_text())
    pid = int(log.read_text().split()[0])
    assert pid in members(plan.marker, ())
    end(plan, supervisor)
    wait_until(lambda: not alive(pid))


def test_one_that_floods_its_output_goes_on_and_stops(tmp_path: Path) -> None:
    flood = "import sys\nwhile True: sys.stdout.write('x' * 4096 + chr(10))"
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", flood))
    supervisor = watched(plan, [])
    log = plan.workers[0].log_path
    wait_until(lambda: log.exists() and log.stat().st_size > 1_000_000)
    assert end(plan, supervisor) == {"agg-0": "clean"}


def test_a_second_signal_while_stopping_kills_at_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0", IGNORES_SIGTERM))
    supervisor = watched(plan, [])
    wait_until(lambda: "deaf" in plan.workers[0].log_path.read_text())
    interruption = Interruption()
    interruption.count = 2
    supervisor.end_watch()
    endings = stop(plan, supervisor.slots, supervisor.sessions, deadline_s=600, hurry=lambda: interruption.is_hurried)
    assert endings == {"agg-0": "forced"}


def test_a_program_that_is_not_there_ends_the_launch(tmp_path: Path) -> None:
    spec = process(tmp_path, "agg-0")
    missing = type(spec)(**{**{f: getattr(spec, f) for f in spec.__slots__}, "argv": ("/no/such/program",)})
    with (
        pytest.raises(LaunchError, match="agg-0 can't be started"),
        serve(plan_of(tmp_path, missing), on_event=lambda event: None),
    ):
        pytest.fail("nothing was started")


def alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_the_launcher_itself_is_no_member_of_a_topology(tmp_path: Path) -> None:
    assert os.getpid() not in members("PATH=" + os.environ.get("PATH", ""), ())

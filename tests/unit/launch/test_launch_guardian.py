"""The guardian: what is left of a topology whose launcher was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trtx.engine.ranks import descendants
from trtx.launch.guardian import Guardian
from trtx.launch.processes import members

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
LAUNCHER = f"""
import subprocess, sys, time
from pathlib import Path
from trtx.launch.guardian import Guardian
guardian = Guardian(sys.argv[1], Path(sys.argv[2]))
name, _, value = sys.argv[1].partition("=")
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True, stdout=subprocess.PIPE,
                         env={{name: value}} if sys.argv[3] == "marked" else {{}})
child.stdout.readline()
guardian.watch(child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["marked", "known only by its session"])
def test_it_ends_a_deaf_child_and_the_scratch_files_when_the_launcher_is_killed(tmp_path: Path, how: str) -> None:
    marker = f"TRTX_TOPOLOGY=guarded-{tmp_path.name}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "record").write_text("x")
    command = [sys.executable, "-c", LAUNCHER, marker, str(scratch), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        session = int(launcher.stdout.readline())
        assert members(marker, (session,)) == {session}
        os.killpg(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not members(marker, (session,)))
    wait_until(lambda: not scratch.exists())


def test_after_a_goodbye_it_touches_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    marker = f"TRTX_TOPOLOGY=greeted-{tmp_path.name}"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        guardian = Guardian(marker, scratch)
        guardian.watch(child.pid)
        guardian.goodbye()
        assert child.poll() is None
        assert scratch.exists()
    finally:
        child.kill()
        child.wait()


def test_one_that_was_killed_is_replaced_and_knows_the_children(tmp_path: Path) -> None:
    guardian = Guardian(f"TRTX_TOPOLOGY=replaced-{tmp_path.name}", tmp_path / "scratch")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        guardian.watch(child.pid)
        first = guardian._process
        first.kill()
        first.wait()
        guardian.ensure_alive()
        assert guardian._process.pid != first.pid
        assert guardian._process.stdin is not None
        guardian._process.stdin.close()  # as if the launcher had died
        assert child.wait(timeout=10) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
        guardian._process.wait(timeout=10)


def test_ranks_that_carry_no_marker_are_ended_too_by_one_that_was_replaced(tmp_path: Path) -> None:
    guardian = Guardian(f"TRTX_TOPOLOGY=ranks-{tmp_path.name}", tmp_path / "scratch")
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
    try:
        (known,) = [found for found in descendants(os.getpid()) if found.pid == rank.pid]
        guardian.watch_ranks("agg-0", (known,))
        guardian._process.kill()
        guardian._process.wait()
        guardian.ensure_alive()
        assert guardian._process.stdin is not None
        guardian._process.stdin.close()  # as if the launcher had died
        assert rank.wait(timeout=10) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
        guardian._process.wait(timeout=10)

"""Processes of an engine are known by pid and start time, and only those are ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trtx.engine.ranks import Rank, descendants, end

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and one in a session of its own that it started."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent, child
    end(descendants(os.getpid()))
    parent.kill()
    parent.wait()


def test_a_child_of_a_child_in_another_session_is_found(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    assert [rank.pid for rank in descendants(parent.pid)] == [child]
    assert {parent.pid, child} <= {rank.pid for rank in descendants(os.getpid())}


def test_what_outlives_its_parent_is_ended_by_what_was_recorded(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    recorded = descendants(parent.pid)
    parent.kill()
    parent.wait()
    assert recorded[0].is_alive
    assert end(recorded) == recorded
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)  # it was never a child of this process: nothing to reap here
    deadline = time.monotonic() + 30  # init reaps it
    while recorded[0].is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not recorded[0].is_alive and end(recorded) == ()


def test_another_process_with_the_same_pid_is_left_alone(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, _ = family
    (rank,) = [rank for rank in descendants(os.getpid()) if rank.pid == parent.pid]
    assert end([Rank(rank.pid, rank.started - 1)]) == ()
    assert parent.poll() is None


def test_a_process_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert end([Rank(gone.pid, 1)]) == ()

"""Who is killed, and when: of real processes, which show whether they are stopped, live or are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from trtx.evals.parity import Pass
from trtx.evals.parity.asking import Stream
from trtx.experiment.parity.kill import MOST_RUNNING_LOOKS, PATIENT_TRIES, SETTLED_LOOKS, Kill, Killer
from trtx.launch.processes import is_stopped

OSL = 8


@dataclass
class Workers:
    """Two, which wait on an engine's process each: 1 is ``agg-0``, 2 is ``agg-1``."""

    processes: dict[str, subprocess.Popen[str]]
    engines: dict[str, int]
    kills: list[Kill]

    def pid_of(self, name: str) -> int | None:
        return self.processes[name].pid if self.processes[name].poll() is None else None

    def killer(self) -> Killer:
        return Killer({1: "agg-0", 2: "agg-1"}, self.pid_of, OSL, 2, self.kills.append)

    def are_stopped(self, *names: str) -> bool:
        """Exactly these engines, and no worker; signals take a moment to arrive."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if {name for name, pid in self.engines.items() if is_stopped(pid)} == {*names}:
                return not any(is_stopped(one.pid) for one in self.processes.values())
            time.sleep(0.01)
        return False


@pytest.fixture
def workers() -> Iterator[Workers]:
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    names = ("agg-0", "agg-1")
    processes = {name: subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for name in names}
    engines = {name: int(one.stdout.readline()) for name, one in processes.items() if one.stdout is not None}
    yield Workers(processes, engines, [])
    for pid in (*engines.values(), *(one.pid for one in processes.values() if one.poll() is None)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for one in processes.values():
        one.communicate()


def stream(worker: int | None, tokens: int) -> Stream:
    return Stream(token_ids=list(range(tokens)), workers={} if worker is None else {"decode": worker})


def look(killer: Killer, now: Pass, times: int) -> None:
    for _ in range(times):
        killer.look(now)


def test_an_engine_is_stopped_until_nothing_comes_and_its_worker_killed_for_what_it_owes(
    workers: Workers,
) -> None:
    killer, now = workers.killer(), Pass(under_way={0: stream(2, 1), 1: stream(2, 1), 2: stream(2, 1), 3: stream(1, 1)})
    killer.look(now)
    assert workers.are_stopped("agg-1"), "the one that most streams came of"
    for tokens in (2, 5):  # what lay in sockets
        look(killer, now, SETTLED_LOOKS - 1)
        now.under_way[0] = stream(2, tokens)
    look(killer, now, SETTLED_LOOKS)
    assert not workers.kills and workers.are_stopped("agg-1")
    now.under_way[2] = stream(2, OSL)  # whole: it owes nothing of that one
    look(killer, now, SETTLED_LOOKS + 1)
    assert workers.kills == [killer.kill] == [Kill("agg-1", frozenset({0, 1}))]
    assert workers.processes["agg-1"].wait(20) == -9 and workers.pid_of("agg-0") is not None
    look(killer, now, 100)
    assert workers.are_stopped() and len(workers.kills) == 1, "one kill is enough"


def test_one_that_owes_nothing_goes_on_and_it_is_tried_again(workers: Workers) -> None:
    killer, now = workers.killer(), Pass(under_way={0: stream(1, 1), 1: stream(1, 1)})
    killer.look(now)
    now.under_way = {0: stream(1, OSL), 2: stream(None, 0)}
    look(killer, now, SETTLED_LOOKS)
    assert workers.are_stopped() and not workers.kills and workers.pid_of("agg-0") is not None
    now.under_way = {3: stream(1, 4), 4: stream(1, 4)}
    killer.look(now)
    assert workers.are_stopped("agg-0")
    look(killer, now, SETTLED_LOOKS + 1)
    assert workers.kills == [Kill("agg-0", frozenset({3, 4}))]


def test_after_some_tries_one_answer_is_enough_and_none_never_is(workers: Workers) -> None:
    killer, now = workers.killer(), Pass(under_way={0: stream(1, 3)})
    round_ = MOST_RUNNING_LOOKS + SETTLED_LOOKS + 2
    while killer.tries < PATIENT_TRIES:
        killer.look(now)
    assert not workers.kills
    now.under_way = {}
    now.cancelled = 1
    look(killer, now, round_ * 3)
    assert not workers.kills and workers.pid_of("agg-0") is not None
    now.under_way = {7: stream(1, 3)}
    look(killer, now, round_ * 2)
    assert workers.kills == [Kill("agg-0", frozenset({7}))]


def test_a_worker_is_let_go_however_a_pass_ends(workers: Workers) -> None:
    killer, now = workers.killer(), Pass(under_way={0: stream(1, 1), 1: stream(1, 1)})
    killer.look(now)
    assert workers.are_stopped("agg-0")
    killer.let_go()
    assert workers.are_stopped() and workers.pid_of("agg-0") is not None


def test_a_worker_without_a_process_of_its_engine_is_stopped_itself(workers: Workers) -> None:
    alone = subprocess.Popen(["sleep", "600"])
    killer = Killer({1: "alone"}, lambda name: alone.pid, OSL, 1, workers.kills.append)
    now = Pass(under_way={0: stream(1, 1)})
    try:
        killer.look(now)
        deadline = time.monotonic() + 20
        while not is_stopped(alone.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(alone.pid)
        look(killer, now, SETTLED_LOOKS + 1)
        assert alone.wait(20) == -9 and workers.kills == [Kill("alone", frozenset({0}))]
    finally:
        alone.kill()
        alone.wait()


def test_nobody_is_stopped_before_the_first_word(workers: Workers) -> None:
    killer = workers.killer()
    look(killer, Pass(under_way={0: stream(None, 0)}), 50)
    assert workers.are_stopped()

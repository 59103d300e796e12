"""Outlives the launcher: when it dies without a goodbye, ends the topology and deletes what it left on disk.

``python -m trtx.launch.guardian --marker NAME=VALUE --scratch DIR`` reads lines from its standard input: ``pid N`` for
each child, ``rank N STARTED`` for each process of its engine (see ``engine.ranks``), ``goodbye`` when the launcher has
cleaned up by itself. End of file without a goodbye means that the launcher was killed. It runs in a session of its own
and ignores SIGINT, SIGTERM and SIGHUP, so that what ends the launcher's terminal, group or service leaves it to do its
work; its pipe is what ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from trtx.engine import ranks
from trtx.engine.ranks import Rank
from trtx.launch.environment import child_environment
from trtx.launch.processes import end_members

# Together well below ten seconds: nobody waits for the answers of a topology whose launcher is gone.
GRACE_S = 2.0
KILL_S = 5.0


class Guardian:
    """The launcher's end of the pipe."""

    def __init__(self, marker: str, scratch_dir: Path) -> None:
        self._command = [sys.executable, "-m", "trtx.launch.guardian", "--marker", marker]
        self._command += ["--scratch", str(scratch_dir)]
        self._sessions: list[int] = []
        self._ranks: dict[str, tuple[Rank, ...]] = {}
        self._process = self._start()

    def watch(self, pid: int) -> None:
        """Adds a child. It leads a session of its own, so that one number names all that it starts."""
        self._sessions.append(pid)
        self._tell(f"pid {pid}\n")

    def watch_ranks(self, name: str, ranks: tuple[Rank, ...]) -> None:
        """The processes of one worker's engine as they are now: one may have left the worker's session."""
        new = set(ranks) - set(self._ranks.get(name, ()))
        self._ranks[name] = ranks
        for rank in sorted(new, key=lambda rank: rank.pid):
            self._tell(f"rank {rank.pid} {rank.started}\n")

    def ensure_alive(self) -> None:
        """Starts another guardian if this one was killed."""
        if self._process.poll() is not None:
            try:
                self._process = self._start()
            except OSError:  # no process or descriptor to be had now: the next look tries again
                return
            for pid in self._sessions:
                self._tell(f"pid {pid}\n")
            told, self._ranks = self._ranks, {}
            for name, known in told.items():
                self.watch_ranks(name, known)

    def goodbye(self) -> None:
        """Sends it home: everything is cleaned up."""
        self._tell("goodbye\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(os.environ, {}),
            start_new_session=True,
        )

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # ensure_alive notices and tells the next one
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="trtx.launch.guardian")
    parser.add_argument("--marker", required=True)
    parser.add_argument("--scratch", required=True, type=Path)
    arguments = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sessions: set[int] = set()
    engine_ranks: set[Rank] = set()
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "goodbye":
            return
        if word == "pid":
            sessions.add(int(numbers[0]))
        elif word == "rank":
            engine_ranks.add(Rank(*map(int, numbers)))
    end_members(arguments.marker, sessions, grace_s=GRACE_S, kill_s=KILL_S)
    ranks.end(engine_ranks)
    shutil.rmtree(arguments.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

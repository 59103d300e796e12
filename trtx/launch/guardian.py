"""A process that outlives the launcher: if the launcher is killed, it ends the topology and deletes its files.

``python -m trtx.launch.guardian --marker NAME=VALUE --scratch DIR --launcher PID`` reads lines from its standard input:

- ``pid N``: a child of the launcher.
- ``rank N STARTED``: a process of a worker's engine (see ``engine.ranks``).
- ``etcd JSON``: the etcd in which workers register, and the paths of its credentials.
- ``worker N``: a registered worker's id.
- ``goodbye``: the launcher has cleaned up itself.

End of file without a goodbye means that the launcher was killed. The guardian runs in a session of its own and ignores
SIGINT, SIGTERM and SIGHUP. So a signal to the launcher's terminal, process group or service does not end it. It ends
when its pipe ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtx.engine import ranks
from trtx.engine.ranks import Rank
from trtx.errors import TrtxError
from trtx.launch.environment import child_environment
from trtx.launch.processes import end_members
from trtx.launch.scratch import remove_own

if TYPE_CHECKING:
    from trtx.topology import EtcdService

# Well below ten seconds in total: after the launcher's death no client waits for the topology's answers.
GRACE_S = 2.0
KILL_S = 5.0


class Guardian:
    """The launcher's side of the pipe."""

    def __init__(self, marker: str, scratch_dir: Path, etcd: EtcdService | None = None) -> None:
        """``etcd``: where workers register; None for files under ``scratch_dir``."""
        self._command = [sys.executable, "-m", "trtx.launch.guardian", "--marker", marker]
        self._command += ["--scratch", str(scratch_dir), "--launcher", str(os.getpid())]
        self._sessions: list[int] = []
        self._ranks: dict[str, tuple[Rank, ...]] = {}
        self._workers: dict[str, int] = {}
        self._etcd = None if etcd is None else _to_line(etcd)
        self._process = self._start()
        self._tell_of_etcd()

    def watch(self, pid: int) -> None:
        """Adds a child.

        It leads its own session, so its pid identifies all processes that it starts in that session.
        """
        self._sessions.append(pid)
        self._tell(f"pid {pid}\n")

    def watch_ranks(self, name: str, ranks: tuple[Rank, ...]) -> None:
        """Updates the processes of one worker's engine, because some may have left the worker's session."""
        new = set(ranks) - set(self._ranks.get(name, ()))
        self._ranks[name] = ranks
        for rank in sorted(new, key=lambda rank: rank.pid):
            self._tell(f"rank {rank.pid} {rank.started}\n")

    def watch_worker(self, name: str, worker_id: int) -> None:
        """Adds a registered worker: the guardian removes what it registered in etcd."""
        if self._workers.get(name) != worker_id:
            self._workers[name] = worker_id
            self._tell(f"worker {worker_id}\n")

    def ensure_alive(self) -> None:
        """Starts another guardian if this one was killed."""
        if self._process.poll() is not None:
            try:
                self._process = self._start()
            except OSError:  # no process or file descriptor is available now; the next call tries again
                return
            for pid in self._sessions:
                self._tell(f"pid {pid}\n")
            self._tell_of_etcd()
            ranks, self._ranks = self._ranks, {}
            for name, known in ranks.items():
                self.watch_ranks(name, known)
            for worker_id in self._workers.values():
                self._tell(f"worker {worker_id}\n")

    def goodbye(self) -> None:
        """Ends the guardian: the launcher has cleaned up."""
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

    def _tell_of_etcd(self) -> None:
        if self._etcd is not None:
            self._tell(f"etcd {self._etcd}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # ensure_alive notices the death and repeats everything to the next guardian
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="trtx.launch.guardian")
    parser.add_argument("--marker", required=True)
    parser.add_argument("--scratch", required=True, type=Path)
    parser.add_argument("--launcher", type=int, help="shown in lists of processes; read by trtx.launch.leftovers")
    arguments = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sessions: set[int] = set()
    engine_ranks: set[Rank] = set()
    workers: set[int] = set()
    etcd = ""
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "goodbye":
            return
        if word == "pid":
            sessions.add(int(numbers[0]))
        elif word == "rank":
            engine_ranks.add(Rank(*map(int, numbers)))
        elif word == "worker":
            workers.add(int(numbers[0]))
        elif word == "etcd":
            etcd = line.partition(" ")[2]
    end_members(arguments.marker, sessions, grace_s=GRACE_S, kill_s=KILL_S)
    ranks.end(engine_ranks)
    if etcd:
        _revoke(etcd, workers)
    remove_own(arguments.scratch)


def _to_line(etcd: EtcdService) -> str:
    paths = (
        {name: str(value) for name, value in asdict(etcd.credentials).items() if value} if etcd.credentials else None
    )
    return json.dumps({"endpoints": etcd.endpoints, "auth": paths})


def _revoke(line: str, workers: set[int]) -> None:
    """Removes the registrations of killed workers, to which requests would be routed until their leases expire."""
    from trtx.planes.credentials import EtcdAuth  # imported late, so that the guardian stays small while it waits
    from trtx.planes.etcd import Etcd

    named = json.loads(line)
    with contextlib.suppress(TrtxError, ValueError):
        secrets = None
        if (given := named["auth"]) is not None:
            files = {name: Path(path) for name, path in given.items() if name != "username"}
            secrets = EtcdAuth(username=given.get("username"), **files).read()
        with Etcd(named["endpoints"], secrets) as client:
            for worker_id in workers:
                client.revoke(worker_id)


if __name__ == "__main__":
    main()

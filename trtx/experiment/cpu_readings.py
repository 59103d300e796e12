"""Reads CPU times from ``/proc`` during a measurement: of all cores, and of the run's processes.

The run's processes are this process, its descendants, and processes with a topology's marker. All other process time
counts as foreign, including that of invisible processes, e.g. outside of a container: ``/proc/stat`` includes them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtx.bench.cores import BusyProcess, CpuReading, Scope
from trtx.topology import TOPOLOGY_VARIABLE

_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_MOST_LISTED = 3  # foreign processes listed per reading
# PF_KTHREAD, Linux's include/linux/sched.h; kernel threads are numerous and not counted as foreign.
_KERNEL = 0x00200000


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    flags: int
    own_ticks: int
    ticks: int  # including those of waited-for children
    started: int  # distinguishes processes that reuse a pid


@dataclass(slots=True)
class _Known:
    process: _Process
    is_run: bool
    is_adopted: bool = False  # its parent isn't part of the run, so no process of the run will wait for it


class CpuReader:
    """Reads the CPU times of one machine repeatedly.

    It remembers processes, so that a process whose parent has ended is still attributed correctly.
    """

    def __init__(
        self, topologies: Collection[str] = (), *, scope: Scope = "run", root: int | None = None,
        proc: Path = Path("/proc"), cores: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """``topologies`` names those whose processes belong to the run, in addition to descendants of ``root``.

        ``root`` None means this process. As long as no process with a topology's marker has been seen, the scope is
        "unknown". ``cores`` are the cores to count (None: those on which this process may run).
        """
        self._topologies, self._scope, self._proc = tuple(topologies), scope, proc
        self._root = os.getpid() if root is None else root
        self._cores = os.sched_getaffinity(0) if cores is None else frozenset(cores)
        self._known: dict[int, _Known] = {}
        self._kernel: set[int] = set()
        self._ended_ticks = 0  # ticks of ended run processes for which no run process waited
        self._run_ticks = 0  # total so far
        self._has_seen_marked = not self._topologies

    @property
    def scope(self) -> Scope:
        """The scope as of the last reading."""
        return self._scope if self._has_seen_marked else "unknown"

    def read(self) -> CpuReading | None:
        """The current CPU times; None if the kernel reports none, as in some sandboxes."""
        counted = self._counted()
        if counted is None:
            return None
        cores, total, idle, processes, stolen = counted
        others = tuple(self._look_around())
        return CpuReading(
            cores,
            total / _TICKS,
            idle / _TICKS,
            processes / _TICKS,
            stolen / _TICKS,
            self._run_ticks / _TICKS,
            others,
            self.scope,
        )

    def _counted(self) -> tuple[int, int, int, int, int] | None:
        """Number of cores, and their summed ticks: total, idle, used by processes, stolen."""
        try:
            lines = (self._proc / "stat").read_text(encoding="ascii").splitlines()
            rows = [line.split() for line in lines if line[:3] == "cpu" and line[3].isdigit()]
            # user nice system idle iowait irq softirq steal; guest time is already included in user.
            columns = [[int(word) for word in row[1:9]] for row in rows if int(row[0][3:]) in self._cores]
            user, nice, system, idle, waiting, _, _, stolen = map(sum, zip(*columns, strict=True))
        except (OSError, ValueError):
            return None
        total = sum(map(sum, columns))
        return (len(columns), total, idle + waiting, user + nice + system, stolen) if total else None

    def _look_around(self) -> list[BusyProcess]:
        """Scans all processes. Returns the foreign ones that used most since the last scan."""
        found = dict(self._processes())
        known: dict[int, _Known] = {}
        used: list[tuple[int, int, str]] = []
        for pid, process in found.items():
            before = self._known.get(pid)
            if before is not None and before.process.started != process.started:
                before = None
            is_run = before.is_run if before is not None else self._is_of_run(pid, found)
            known[pid] = _Known(process, is_run)
            ticks = process.own_ticks - (before.process.own_ticks if before is not None else process.own_ticks)
            if ticks > 0 and not is_run:
                used.append((ticks, pid, process.name))
        ours = {pid for pid, one in known.items() if one.is_run}
        for pid in ours:
            known[pid].is_adopted = pid != self._root and known[pid].process.parent not in ours
        self._count(known)
        return [
            BusyProcess(pid, name, ticks / _TICKS) for ticks, pid, name in sorted(used, reverse=True)[:_MOST_LISTED]
        ]

    def _count(self, known: dict[int, _Known]) -> None:
        """Updates the run's ticks, which never decrease: a parent that waits for a child inherits the child's ticks."""
        for pid, before in self._known.items():
            now = known.get(pid)
            has_ended = now is None or now.process.started != before.process.started
            if before.is_run and before.is_adopted and has_ended:
                self._ended_ticks += before.process.ticks
        ticks = self._ended_ticks + sum(one.process.ticks for one in known.values() if one.is_run)
        if ticks < self._run_ticks:  # a process ended between two readings, and its parent before it
            self._ended_ticks += self._run_ticks - ticks
        self._run_ticks = max(self._run_ticks, ticks)
        self._known = known

    def _processes(self) -> Iterator[tuple[int, _Process]]:
        pids = {int(path.name) for path in self._proc.iterdir() if path.name.isdigit()}
        self._kernel &= pids
        for pid in pids - self._kernel:
            try:
                text = (self._proc / str(pid) / "stat").read_bytes()
                # pid (comm) state ppid …; comm may contain spaces and brackets.
                head, _, tail = text.rpartition(b")")
                words = tail.split()
                user, system, childrens_user, childrens_system = map(int, words[11:15])
                process = _Process(
                    name=head.partition(b"(")[2].decode(errors="replace"),
                    parent=int(words[1]),
                    flags=int(words[6]),
                    own_ticks=user + system,
                    ticks=user + system + childrens_user + childrens_system,
                    started=int(words[19]),
                )
            except (OSError, ValueError, IndexError):
                continue  # the process has ended
            if process.flags & _KERNEL:
                self._kernel.add(pid)
            else:
                yield pid, process

    def _is_of_run(self, pid: int, found: Mapping[int, _Process]) -> bool:
        if self._is_marked(pid):
            return True
        at, passed = pid, set[int]()
        while at in found and at not in passed:
            known = self._known.get(at)
            if at == self._root or (known and known.is_run and known.process.started == found[at].started):
                return True
            passed.add(at)
            at = found[at].parent
        return False

    def _is_marked(self, pid: int) -> bool:
        if not self._topologies:
            return False
        try:
            entries = (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's process, or one that has ended
            return False
        marks = {f"{TOPOLOGY_VARIABLE}={one}".encode() for one in self._topologies}
        is_marked = not marks.isdisjoint(entries)
        self._has_seen_marked |= is_marked
        return is_marked

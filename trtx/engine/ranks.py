"""Records the processes that an engine started, so that the launcher or the guardian can kill exactly those later.

A rank may leave its worker's session (MPI's daemon does) and survive the worker while it holds GPU memory (TensorRT-LLM
issue 16404). A pid may be reused by then; pid and start time together identify a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

_STAT_BYTES = 4096  # more than any /proc/<pid>/stat has


@dataclass(frozen=True, slots=True)
class Rank:
    """One process. ``started``: its start in clock ticks since boot, as in /proc/<pid>/stat."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """False for a zombie, and if the pid now belongs to another process."""
        found = _look(self.pid)
        return found is not None and found[1] == self


def descendants(pid: int) -> tuple[Rank, ...]:
    """All living processes that ``pid`` started, directly or through living ancestors, sorted by pid.

    Every worker calls this each second and it reads a file of each process of the host, so it avoids pathlib and
    buffered files, which took three quarters of its time.
    """
    parents: dict[int, int] = {}
    ranks: dict[int, Rank] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (found := _look(int(name))) is not None:
            parents[found[1].pid], ranks[found[1].pid] = found[0], found[1]
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return tuple(ranks[member] for member in sorted(family - {pid}))


def end(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Kills the ranks that are still alive, and returns them."""
    ended = []
    for rank in ranks:
        try:
            # From here on, the pidfd refers to this process even if its pid is reused.
            handle = os.pidfd_open(rank.pid)
        except OSError:
            continue
        try:
            if rank.is_alive:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                ended.append(rank)
        except OSError:
            pass
        finally:
            os.close(handle)
    return tuple(ended)


def _look(pid: int) -> tuple[int, Rank] | None:
    """Parent pid and identity of a process; None if it is gone or a zombie."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            content = os.read(file, _STAT_BYTES)
        finally:
            os.close(file)
    except OSError:
        return None
    # pid (comm) state ppid … starttime is field 22; comm may contain spaces and parentheses.
    fields = content.rpartition(b")")[2].split(None, 20)
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), Rank(pid, int(fields[19]))

"""The processes that an engine started, recorded so that whoever outlives its worker can end exactly those.

A rank may leave its worker's session (MPI's daemon does) and survive it with its GPU memory (TensorRT-LLM issue
16404). A pid alone may name another process by then; with the start time it can't.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Rank:
    """One process. ``started``: clock ticks from the machine's boot to its start, as /proc/<pid>/stat has it."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """False for a zombie, and for another process with the same pid."""
        found = _look(self.pid)
        return found is not None and found[1] == self


def descendants(pid: int) -> tuple[Rank, ...]:
    """Every living process that ``pid`` started, directly or not, as far as its ancestors still live. By pid."""
    parents: dict[int, int] = {}
    ranks: dict[int, Rank] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := _look(int(entry.name))) is not None:
            parents[found[1].pid], ranks[found[1].pid] = found[0], found[1]
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return tuple(ranks[member] for member in sorted(family - {pid}))


def end(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Kills those that still live, and returns them."""
    ended = []
    for rank in ranks:
        try:
            # The pidfd names this very process from here on, whatever happens to its number.
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
    """Parent and identity of a process; None where it is gone, or a zombie."""
    try:
        # pid (comm) state ppid … starttime is field 22; comm may hold spaces and brackets.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), Rank(pid, int(fields[19]))

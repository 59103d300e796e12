"""CPU time of a machine's cores, used by a run and by other processes. Pure.

Readings are seconds since boot. Values for a part of a trial are differences of two readings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

# Utilisation from which cores count as short: a process that becomes runnable has to wait for a core, or takes time
# from another process. The remaining tenth allows for the kernel's tick accounting and for waits of milliseconds.
SHORT = 0.90
STOLEN = "other machines of this host"  # time that the hypervisor gave to other machines ("steal")

# run: all processes of the run are known. client: the deployment runs on another machine, which is not read. unknown:
# the deployment runs on this machine, and its processes are not known.
Scope = Literal["run", "client", "unknown"]


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """A process outside the run that used CPU time since the previous reading."""

    pid: int
    name: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU time of the cores that a run may use, at one moment: seconds, summed over all cores."""

    cores: int
    total_s: float  # including idle time
    idle_s: float  # including time waiting for a disk
    processes_s: float  # used by processes, and by the kernel on their behalf; excludes interrupts
    stolen_s: float  # used by other machines on the same host
    run_s: float  # the part of processes_s that the run's processes used
    others: tuple[BusyProcess, ...] = ()  # the visible processes that used most
    scope: Scope = "run"


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU use over the measured parts of one or more trials."""

    cores: int
    total_s: float
    foreign_s: float  # used by others while cores were short
    by_user: Mapping[str, float]  # the part of foreign_s whose user is known
    scope: Scope

    @property
    def foreign_share(self) -> float:
        """Foreign time as a share of all core time. Time used while a core was idle takes nothing from the run."""
        return self.foreign_s / self.total_s if self.total_s else 0.0


def used(readings: Sequence[CpuReading]) -> CpuUse | None:
    """CPU use from the first reading to the last; None with fewer than two readings, or if cores or scope changed."""
    if len(readings) < 2 or len({(one.cores, one.scope) for one in readings}) > 1:
        return None
    foreign, by_user = 0.0, defaultdict[str, float](float)
    for before, now in pairwise(readings):
        total = now.total_s - before.total_s
        if total <= 0 or now.idle_s - before.idle_s > (1 - SHORT) * total:
            continue
        stolen = now.stolen_s - before.stolen_s
        # Negative only through the kernel's rounding, which the next interval compensates.
        foreign += now.processes_s - before.processes_s - (now.run_s - before.run_s) + stolen
        by_user[STOLEN] += stolen
        for one in now.others:
            by_user[f"{one.name} (pid {one.pid})"] += one.cpu_s
    first, last = readings[0], readings[-1]
    return CpuUse(first.cores, last.total_s - first.total_s, max(0.0, foreign), dict(by_user), first.scope)


def over_trials(trials: Sequence[CpuUse | None]) -> CpuUse | None:
    """CPU use summed over all trials; None if a trial's is unknown or there is no trial."""
    known = [one for one in trials if one is not None]
    if not known or len(known) < len(trials) or len({(one.cores, one.scope) for one in known}) > 1:
        return None
    by_user = defaultdict[str, float](float)
    for one in known:
        for user, seconds in one.by_user.items():
            by_user[user] += seconds
    return CpuUse(
        known[0].cores,
        sum(one.total_s for one in known),
        sum(one.foreign_s for one in known),
        dict(by_user),
        known[0].scope,
    )

"""How long the cores of a machine were used, by a run and by whatever else there is on it. Pure.

Whoever reads it counts seconds since the machine was booted; what follows of a part of a trial are differences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

# From this share of their time on, cores count as short: a process that becomes ready then finds no idle one at once,
# and what it gets another lacks. A tenth is left for ticks, by which the kernel counts, and for waits of milliseconds.
SHORT = 0.90
STOLEN = "other machines of this host"  # what a hypervisor gave to others ("steal")

# run: every process of the run is known. client: the deployment is on another machine, of which nothing is read.
# unknown: it is on this machine, and which processes are its own is not known.
Scope = Literal["run", "client", "unknown"]


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """One that is not the run's, and used a core since the reading before."""

    pid: int
    name: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class CpuReading:
    """The cores that a run may use, at one moment: seconds of all of them together."""

    cores: int
    total_s: float  # idle ones too
    idle_s: float  # those that wait for a disk are idle
    processes_s: float  # used by processes, and by the kernel for them; interrupts are nobody's
    stolen_s: float  # by other machines of the same host
    run_s: float  # of those of processes, by the run's
    others: tuple[BusyProcess, ...] = ()  # that used most, of those that can be seen here
    scope: Scope = "run"


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Over measured parts."""

    cores: int
    total_s: float
    foreign_s: float  # of others, while cores were short
    by_user: Mapping[str, float]  # of those, as far as it is known whose
    scope: Scope

    @property
    def foreign_share(self) -> float:
        """Of the cores' whole time: what others have while a core is idle takes nothing from the run."""
        return self.foreign_s / self.total_s if self.total_s else 0.0


def used(readings: Sequence[CpuReading]) -> CpuUse | None:
    """From the first reading to the last; None of fewer than two, or where the cores were not the same all the time."""
    if len(readings) < 2 or len({(one.cores, one.scope) for one in readings}) > 1:
        return None
    foreign, by_user = 0.0, defaultdict[str, float](float)
    for before, now in pairwise(readings):
        total = now.total_s - before.total_s
        if total <= 0 or now.idle_s - before.idle_s > (1 - SHORT) * total:
            continue
        stolen = now.stolen_s - before.stolen_s
        # Below 0 by the kernel's rounding alone, which the next interval makes up for.
        foreign += now.processes_s - before.processes_s - (now.run_s - before.run_s) + stolen
        by_user[STOLEN] += stolen
        for one in now.others:
            by_user[f"{one.name} (pid {one.pid})"] += one.cpu_s
    first, last = readings[0], readings[-1]
    return CpuUse(first.cores, last.total_s - first.total_s, max(0.0, foreign), dict(by_user), first.scope)


def over_trials(trials: Sequence[CpuUse | None]) -> CpuUse | None:
    """Of all trials together; None where one of them is not known, or there is none."""
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

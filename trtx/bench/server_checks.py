"""The checks of a cell that need what aiperf's records don't say: its log, the launcher, the GPUs."""

from __future__ import annotations

import math
from statistics import fmean

from trtx.bench.checks import CLIENT_INVALID, CLIENT_SUSPECT, Found, Level, NotObserved, check, client_share, percent
from trtx.bench.evidence import Evidence, GpuReading

_UNEVEN_SHARE, _UNEVEN_SIGMAS = 0.20, 3.0
_FOREIGN_PERCENT = 5.0
# NVML's, without what is normal: a power cap is a GPU's own limit under full load, the others are settings or idleness.
_THROTTLING = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")


@check(
    name="client's event loops",
    suspect=f"one that sends or receives was blocked for more than {CLIENT_SUSPECT:.0%} of the measured time",
    invalid=f"more than {CLIENT_INVALID:.0%}",
    why="an answer that arrives meanwhile gets its time late",
)
def _event_loops(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.event_loop_delays_ms is None:
        return NotObserved("nobody read the client's log")
    measured = [trial.measured for trial in evidence.trials if trial.measured]
    total_ms = sum(max(r.end_ns for r in trial) - min(r.start_ns for r in trial) for trial in measured) / 1e6
    blocked = {
        service: sum(delays)
        for service, delays in evidence.event_loop_delays_ms.items()
        if service.startswith(("worker_", "timing_manager"))  # the others only write what these timed
    }
    if not blocked or not total_ms:
        return None
    worst = max(blocked, key=lambda service: blocked[service])
    share = blocked[worst] / total_ms
    return client_share(share, f"aiperf's {worst} was blocked for {percent(share)} of the measured time")


@check(
    name="restarts",
    invalid="a process of the topology was started again while it was measured",
    why="a part of the figures is of a smaller topology, then of a cold one",
)
def _restarts(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.restarted is None:
        return NotObserved("nobody watched the server's processes")
    if not evidence.restarted:
        return None
    return Found(Level.INVALID, f"started again while it was measured: {', '.join(evidence.restarted)}")


@check(
    name="uneven workers",
    suspect=f"the busiest worker of a role got more than {_UNEVEN_SHARE:.0%} over an equal share, and more than "
    f"{_UNEVEN_SIGMAS:g} √share",
    why="the others idled; it is the router's doing and so the system's own, but seldom what was to be measured",
)
def _uneven_workers(evidence: Evidence) -> Found | NotObserved | None:
    counts = evidence.requests_by_worker
    if counts is None:
        return NotObserved("nobody counted requests by worker")
    if len(counts) < 2:
        return None
    share, busiest = fmean(counts.values()), max(counts, key=lambda worker: counts[worker])
    over = counts[busiest] - share
    if over <= _UNEVEN_SHARE * share or over <= _UNEVEN_SIGMAS * math.sqrt(share):
        return None
    return Found(Level.SUSPECT, f"{busiest} got {counts[busiest]} requests, an equal share is {share:.3g}")


@check(
    name="throttled GPU",
    suspect="a GPU was slowed down by heat or its power brake as the measured part began or ended",
    why="it comes and goes with the room, not with what is compared; a power cap is a GPU's own limit and no reason",
)
def _throttled(evidence: Evidence) -> Found | NotObserved | None:
    readings = _readings(evidence)
    for reading in readings:
        if reasons := [reason for reason in reading.throttle_reasons or () if reason in _THROTTLING]:
            return Found(Level.SUSPECT, f"{reading.name} was throttled ({', '.join(reasons)}){_clock(reading)}")
    unread = _unread(evidence) or any(reading.throttle_reasons is None for reading in readings)
    return NotObserved("GPUs were not read at both ends of the measured part") if unread else None


@check(
    name="foreign GPU use",
    suspect="a process that is not the topology's is on one of its GPUs",
    invalid=f"and has {_FOREIGN_PERCENT:.0f} % or more of its time",
    why="the figures are of a shared GPU; one that only holds memory, as a display server does, may do no harm",
)
def _foreign(evidence: Evidence) -> Found | NotObserved | None:
    readings = _readings(evidence)
    foreign = [
        (process.sm_percent or 0.0, reading, process) for reading in readings for process in reading.foreign or ()
    ]
    if foreign:
        percent, reading, process = max(foreign, key=lambda entry: entry[0])
        level = Level.INVALID if percent >= _FOREIGN_PERCENT else Level.SUSPECT
        used = "use not known" if process.sm_percent is None else f"{percent:.3g} % of its time"
        return Found(level, f"{process.name} (pid {process.pid}) was on {reading.name}, {used}")
    unread = _unread(evidence) or any(reading.foreign is None for reading in readings)
    return NotObserved("GPUs were not read at both ends of the measured part") if unread else None


def _readings(evidence: Evidence) -> tuple[GpuReading, ...]:
    return (*(evidence.gpus_before or ()), *(evidence.gpus_after or ()))


def _unread(evidence: Evidence) -> bool:
    return evidence.gpus_before is None or evidence.gpus_after is None


def _clock(reading: GpuReading) -> str:
    if reading.sm_clock_mhz is None or reading.max_sm_clock_mhz is None:
        return ""
    return f" at {reading.sm_clock_mhz:.0f} of {reading.max_sm_clock_mhz:.0f} MHz"

"""Validity checks of a cell that need more than aiperf's records: its log, the launcher, the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtx.bench.cores import SHORT
from trtx.bench.handoffs import pair_text
from trtx.bench.judge.checks import (
    CLIENT_INVALID,
    CLIENT_SUSPECT,
    Found,
    NotObserved,
    ValidityLevel,
    check,
    client_share,
    percent,
)
from trtx.bench.judge.evidence import Evidence
from trtx.bench.readings import ForeignProcess, GpuReading
from trtx.config.wording import counted
from trtx.stats.percentiles import binomial_tail

_UNEVEN_SHARE, _UNEVEN_CHANCE = 0.20, 0.01
_FOREIGN_PERCENT = 5.0
# Share of core time, equal to the limit for a GPU. If all cores are busy, the run lacks the time that others use.
_FOREIGN_CPU = 0.05
_NAMED_SHARE = 0.10  # minimum share of the foreign time for which a process is named; others may be invisible
_LOST_HANDOFFS = 0.05
# NVML clock reasons that neither a setting nor the load explains: heat, and a power supply that demands less. According
# to NVML's documentation, SwPowerCap means that "the clocks have been optimized to not exceed the currently set power
# limits", which is normal under full load; the remaining reasons are settings or idleness.
_THROTTLING = ("hardware slowdown", "thermal, by hardware", "thermal, by software", "power brake")
# NVML's documentation says of HwSlowdown "May be also reported during PState or clock change", so a single reading of
# it is ignored.
_PASSING = {"hardware slowdown"}

_NOT_READ = NotObserved("GPUs were not read throughout the measured part")


@check(
    name="client's event loops",
    suspect=f"an event loop that sends or receives was blocked for more than {CLIENT_SUSPECT:.0%} of the measured time",
    invalid=f"it was blocked for more than {CLIENT_INVALID:.0%}",
    why="an answer that arrives while the loop is blocked gets a time stamp that is too late",
)
def _event_loops(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.event_loop_delays_ms is None:
        return NotObserved("the client's log was not read")
    measured = [trial.measured for trial in evidence.trials if trial.measured]
    total_ms = sum(max(r.end_ns for r in trial) - min(r.start_ns for r in trial) for trial in measured) / 1e6
    blocked = {
        service: sum(delays)
        for service, delays in evidence.event_loop_delays_ms.items()
        if service.startswith(("worker_", "timing_manager"))  # the other services only write what these have timed
    }
    if not blocked or not total_ms:
        return None
    worst = max(blocked, key=lambda service: blocked[service])
    share = blocked[worst] / total_ms
    return client_share(share, f"aiperf's {worst} was blocked for {percent(share)} of the measured time")


@check(
    name="restarts",
    invalid="a process of the topology was restarted during the measurement",
    why="part of the measurement covers a smaller topology, and then a cold one",
)
def _restarts(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.restarted is None:
        return NotObserved("the server's processes were not supervised")
    if not evidence.restarted:
        return None
    return Found(ValidityLevel.INVALID, f"restarted during the measurement: {', '.join(evidence.restarted)}")


@check(
    name="uneven workers",
    suspect=f"a worker got over {_UNEVEN_SHARE:.0%} more or fewer requests than its equal share among the workers "
    f"of its role, and random routing would do that with a probability below {_UNEVEN_CHANCE:.0%}",
    why="some workers were idle while others were full; with a KV router and shared prefixes this may be intended, so "
    "the check is not made",
)
def _uneven_workers(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.requests_by_worker is None:
        return NotObserved("requests were not counted by worker")
    uneven = [sentence for counts in evidence.requests_by_worker.values() if (sentence := _uneven(counts))]
    if not uneven:
        return None
    # The router may prefer workers that cache a prefix, and prompts may share one, so uneven counts may be intended.
    if evidence.prompts != "unique" and evidence.routes_by_prefix is not False:
        return NotObserved(f"{uneven[0]}, which a router may intend if prompts share prefixes")
    return Found(ValidityLevel.SUSPECT, uneven[0])


def _uneven(counts: Mapping[str, int]) -> str | None:
    """For one role, a clause about the worker furthest from an equal share; None unless the gap is large and
    significant.
    """
    total = sum(counts.values())
    if len(counts) < 2 or not total:
        return None
    share = total / len(counts)
    worst = max(counts, key=lambda worker: abs(counts[worker] - share))
    if abs(counts[worst] - share) <= _UNEVEN_SHARE * share:
        return None
    # Any worker could be the outlier, in either direction (Bonferroni).
    if 2 * len(counts) * binomial_tail(counts[worst], total, 1 / len(counts)) >= _UNEVEN_CHANCE:
        return None
    return f"{worst} got {counts[worst]} of {total} requests; an equal share is {share:.4g}"


@check(
    name="lost handoffs",
    suspect="a decode worker computed a prompt whose KV should have come from a prefill worker",
    invalid=f"this happened to more than {_LOST_HANDOFFS:.0%} of the prompts",
    why="such a prompt is computed twice, or by the decode worker alone, so a disaggregated topology has only its "
    "costs left, although no request fails",
)
def _lost_handoffs(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.handoffs is None:
        return NotObserved("handoffs were not counted")
    pairs = {
        pair_text(decode, prefill): counts
        for decode, by_prefill in evidence.handoffs.items()
        for prefill, counts in by_prefill.items()
    }
    lost, requests = sum(one.lost for one in pairs.values()), sum(one.requests for one in pairs.values())
    if lost:
        worst = max(pairs, key=lambda name: pairs[name].lost)
        level = ValidityLevel.INVALID if lost > _LOST_HANDOFFS * requests else ValidityLevel.SUSPECT
        most = f"; {pairs[worst].lost} of them went from {worst}"
        return Found(level, f"{lost} of {requests} prompts were computed without the KV of a prefill worker{most}")
    if any(one.unknown for one in pairs.values()):
        return NotObserved("the decode workers' engine does not report whether KV arrived")
    return None


@check(
    name="throttled GPU",
    suspect="heat or the power brake slowed down a GPU during the measurement",
    why="this depends on the machine room and not on what is compared; reaching the power limit is normal under full "
    "load and is not a reason",
)
def _throttled(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.gpus is None:
        return _NOT_READ
    if (sentence := throttled(evidence.gpus)) is not None:
        return Found(ValidityLevel.SUSPECT, sentence)
    unsaid = [one.name for one in evidence.gpus if one.clock_reasons is None]
    return NotObserved(f"NVML does not report why clocks of {unsaid[0]} are reduced") if unsaid else None


def throttled(gpus: Sequence[GpuReading]) -> str | None:
    """How often a GPU was throttled, as a sentence without a full stop; None if none was."""
    for name, readings in _by_gpu(gpus).items():
        slowed = [one for one in readings if set(one.clock_reasons or ()) & set(_THROTTLING)]
        reasons = dict.fromkeys(why for one in slowed for why in one.clock_reasons or () if why in _THROTTLING)
        if slowed and (len(slowed) > 1 or set(reasons) - _PASSING):
            often = f"in {len(slowed)} of {len(readings)} readings ({'; '.join(reasons)})"
            return f"{name} was throttled {often}{_clock(slowed)}"
    return None


@check(
    name="foreign GPU use",
    suspect="a process outside the topology is on one of its GPUs",
    invalid=f"it uses {_FOREIGN_PERCENT:.0f} % or more of the GPU's time",
    why="the metrics describe a shared GPU; a process that only holds memory, such as a display server, may be "
    "harmless",
)
def _foreign(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.gpus is None:
        return _NOT_READ
    foreign = [(_sm_percent(one), gpu, one) for gpu in evidence.gpus for one in gpu.foreign or ()]
    if foreign:
        most, gpu, process = max(foreign, key=lambda entry: entry[0])
        level = ValidityLevel.INVALID if most >= _FOREIGN_PERCENT else ValidityLevel.SUSPECT
        used = "its use is unknown" if process.sm_percent is None else f"using up to {most:.3g} % of its time"
        return Found(level, f"{process.name or 'a process'} (pid {process.pid}) was on {gpu.name}, {used}")
    unseen = [gpu.name for gpu in evidence.gpus if gpu.foreign is None]
    if not unseen:
        return None
    return NotObserved(
        f"NVML does not show here which processes are on {unseen[0]}, as in a container without --pid=host"
    )


@check(
    name="foreign CPU use",
    suspect=f"processes outside the run used {_FOREIGN_CPU:.0%} or more of the time of its cores; only times at which "
    f"less than {1 - SHORT:.0%} of the cores was idle count",
    why="frontend, workers and client then had to wait for a core; while cores are idle, other processes take nothing "
    "from them",
)
def _foreign_cpu(evidence: Evidence) -> Found | NotObserved | None:
    cpu = evidence.cpu
    if cpu is None:
        return NotObserved("cores were not read throughout the measured part")
    if cpu.scope == "unknown":
        return NotObserved("the deployment runs on this machine, and its processes are not known")
    if cpu.foreign_share >= _FOREIGN_CPU:
        machine = "" if cpu.scope == "run" else " of the client's machine"
        who, seconds = max(cpu.by_user.items(), key=lambda entry: entry[1], default=("", 0.0))
        most = f", most of it by {who}" if seconds >= _NAMED_SHARE * cpu.foreign_s else ""
        had = f"{percent(cpu.foreign_share)} of the time of {counted(cpu.cores, 'core')}{machine}"
        return Found(ValidityLevel.SUSPECT, f"processes outside the run used {had}{most}")
    return NotObserved("only the client's machine was checked, not the deployment's") if cpu.scope == "client" else None


def _sm_percent(process: ForeignProcess) -> float:
    return process.sm_percent or 0.0


def _by_gpu(gpus: Sequence[GpuReading]) -> dict[str, list[GpuReading]]:
    found: dict[str, list[GpuReading]] = {}
    for one in gpus:
        found.setdefault(one.name, []).append(one)
    return found


def _clock(slowed: Sequence[GpuReading]) -> str:
    """The lowest clock and the highest temperature of these readings."""
    clocks = [(one.sm_clock_mhz, one.max_sm_clock_mhz) for one in slowed if one.sm_clock_mhz and one.max_sm_clock_mhz]
    text = " at {} of {} MHz".format(*min(clocks)) if clocks else ""
    heat = [one.temperature_c for one in slowed if one.temperature_c is not None]
    return text + (f", {max(heat)} °C" if heat else "")

"""Readings of a topology during a trial: its GPUs, CPU cores, and the progress of each worker.

The process that serves the topology takes the readings and stores them, each with its time, next to aiperf's files.
Only those of the measured part are evaluated. None means that a value could not be read; an empty value means that
there is nothing to read, for example no GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.bench import cores, draft_counters, handoffs
from trtx.bench.cores import CpuReading, CpuUse
from trtx.bench.documents import DocumentKind, plain
from trtx.bench.draft_counters import DraftCounts
from trtx.bench.files import write_text
from trtx.bench.handoffs import HandoffCounts
from trtx.bench.image_counters import ImageCounts, grown
from trtx.bench.phases import Span

READINGS = DocumentKind("readings.json", version=1, oldest=1, since="")
# Maximum time between an edge of the measured part and the reading that represents it. Readings come about once a
# second, and less often while a worker is busy.
EDGE_NS = 3_000_000_000

WorkerCounts = Mapping[str, Mapping[str, int]]  # number of requests by role, then by worker


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on one of the topology's GPUs that doesn't belong to the topology."""

    pid: int
    name: str | None  # None: unknown, e.g. another user's process
    sm_percent: float | None = None  # share of the GPU's time, as sampled by NVML


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment, from NVML; None if NVML doesn't report a value."""

    name: str  # as shown to users: "GPU 0"
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    clock_reasons: tuple[str, ...] | None = None  # why the clock isn't higher, in the wording of trtx doctor
    power_w: float | None = None
    temperature_c: int | None = None
    memory_used_bytes: int | None = None
    foreign: tuple[ForeignProcess, ...] | None = None
    utilization_percent: float | None = None  # share of the sample period, up to 1 s, in which a kernel ran
    energy_j: float | None = None  # since the driver was loaded
    energy_at_ns: int | None = None  # when that counter was read, ns since 1970


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A topology at one moment."""

    at_ns: int  # ns since 1970
    gpus: tuple[GpuReading, ...] | None  # the topology's GPUs; None: unreadable
    # Since start, by role and worker; None: a worker doesn't report it.
    ended_requests: dict[str, dict[str, int]] | None
    # Since start, by role and worker, for workers that process images; None: there is none, or one doesn't report it.
    pictures: dict[str, dict[str, ImageCounts]] | None = None
    # Since start, by decode and prefill worker; empty: no decode workers; None: one doesn't report it.
    handoffs: dict[str, dict[str, HandoffCounts]] | None = None
    cpu: CpuReading | None = None  # of the machine that takes the readings; None: not reported by the kernel
    # Since start, by role and worker, for workers that speculate and have run a step; None: a worker can't be read.
    drafts: dict[str, dict[str, DraftCounts]] | None = None


@dataclass(frozen=True, slots=True)
class TrialReadings:
    """Content of the file, in order of time."""

    readings: tuple[ServerReading, ...]


def write_readings(directory: Path, readings: Sequence[ServerReading]) -> None:
    """Writes the readings of one trial, one per line. Raises OSError."""
    fields = READINGS.versioned(plain(TrialReadings(tuple(readings))))
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in fields["readings"])
    text = f'{{"schema_version": {fields["schema_version"]}, "readings": [\n{lines}\n]}}\n'
    write_text(directory / READINGS.file, text)


def read_readings(directory: Path) -> tuple[ServerReading, ...] | None:
    """The readings of one trial; None if there are none. Raises UsageError that names the file and the field."""
    found = READINGS.find(directory, TrialReadings)
    return None if found is None else found.readings


def gpus_over(readings: Sequence[ServerReading], measured: Span) -> tuple[GpuReading, ...] | None:
    """All GPU readings of a measured part; None if the part's start or end has none."""
    around = _around(readings, measured)
    if around is None:
        return None
    found = [one.gpus for one in around]
    known = [gpus for gpus in found if gpus is not None]
    # NVML may be slow, so readings in between may be missing. Those at the edges show that the whole part is covered.
    return None if found[0] is None or found[-1] is None else tuple(gpu for gpus in known for gpu in gpus)


def cpu_over(readings: Sequence[ServerReading], measured: Span) -> CpuUse | None:
    """CPU use over a measured part; None if the part's start or end has no CPU reading."""
    around = _around(readings, measured)
    if around is None or around[0].cpu is None or around[-1].cpu is None:
        return None
    return cores.used([one.cpu for one in around if one.cpu is not None])


def requests_over(readings: Sequence[ServerReading], measured: Span, answered: int) -> dict[str, dict[str, int]] | None:
    """Requests that ended on each worker in a measured part, by role and worker.

    None if a worker's count is missing. Also None if the workers together counted fewer than ``answered`` requests:
    then other workers answered some of them, for example behind a forwarded port.

    The count ends with the last reading of the trial: a worker counts a request slightly after the client has the
    answer, and the trial sends no further requests. It begins with the last reading before the part, so it may include
    some warm-up requests.
    """
    around = _around(readings, measured)
    if around is None:
        return None
    first, last = around[0].ended_requests, readings[-1].ended_requests
    if first is None or last is None or _workers(first) != _workers(last):
        return None
    counted = {
        role: {worker: count - first[role][worker] for worker, count in counts.items()} for role, counts in last.items()
    }
    if any(count < 0 for counts in counted.values() for count in counts.values()):
        return None  # a worker was restarted and counts from 0
    seen = max((sum(counts.values()) for counts in counted.values()), default=0)
    return counted if seen >= answered else None


def images_over(readings: Sequence[ServerReading], measured: Span) -> dict[str, ImageCounts] | None:
    """Image counters of a measured part, by role; None if workers didn't report.

    Like :func:`requests_over`, this covers the time from the last reading before the part to the last of the trial.
    """
    around = _around(readings, measured)
    return None if around is None else grown(around[0].pictures, readings[-1].pictures)


def handoffs_over(readings: Sequence[ServerReading], measured: Span) -> dict[str, dict[str, HandoffCounts]] | None:
    """Handoff counters of a measured part, by decode and prefill worker; the time is as in :func:`images_over`."""
    around = _around(readings, measured)
    return None if around is None else handoffs.grown(around[0].handoffs, readings[-1].handoffs)


def drafts_over(readings: Sequence[ServerReading], measured: Span) -> DraftCounts | None:
    """Speculation counters of all workers over a part; None if no worker speculates, or one's counters are missing."""
    around = _around(readings, measured)
    return None if around is None else draft_counters.grown(around[0].drafts, around[-1].drafts)


def summed(counts: Sequence[WorkerCounts]) -> dict[str, dict[str, int]]:
    """Sums over trials, by role and worker."""
    total: dict[str, Counter[str]] = {}
    for of_trial in counts:
        for role, by_worker in of_trial.items():
            total.setdefault(role, Counter()).update(by_worker)
    return {role: dict(by_worker) for role, by_worker in total.items()}


def _workers(counts: WorkerCounts) -> set[tuple[str, str]]:
    return {(role, worker) for role, by_worker in counts.items() for worker in by_worker}


def _around(readings: Sequence[ServerReading], measured: Span) -> Sequence[ServerReading] | None:
    """The readings from the last one before a part to the first one after it; None if one is missing or too far
    away.
    """
    before = [place for place, one in enumerate(readings) if one.at_ns <= measured.start_ns]
    after = [place for place, one in enumerate(readings) if one.at_ns >= measured.end_ns]
    if not before or not after:
        return None
    first, last = before[-1], after[0]
    if measured.start_ns - readings[first].at_ns > EDGE_NS or readings[last].at_ns - measured.end_ns > EDGE_NS:
        return None
    return readings[first : last + 1]

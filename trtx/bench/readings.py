"""What whoever serves a topology reads of it while a trial is made: its GPUs, the cores, how far each worker has come.

Readings of a trial stand beside aiperf's files, each with its time, and are judged by the part that was measured. What
can't be read is None, which is not the same as nothing there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.bench import cores, handoffs
from trtx.bench.cores import CpuReading, CpuUse
from trtx.bench.documents import Document, plain
from trtx.bench.files import write_text
from trtx.bench.handoffs import HandoffCounts
from trtx.bench.pictures import PictureCounts, grown
from trtx.bench.windows import Span

READINGS = Document("readings.json", version=1, oldest=1, since="")
# A reading this close to an edge of the measured part is of that edge: they come about once a second, and one that
# waits for a busy worker takes longer.
_EDGE_NS = 3_000_000_000

WorkerCounts = Mapping[str, Mapping[str, int]]  # requests by role, then by worker


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on one of the topology's GPUs that is not one of the topology's."""

    pid: int
    name: str | None  # None: not to be told, as of another user's
    sm_percent: float | None = None  # of the GPU's time, as NVML samples it


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment, as NVML says it; None is what it does not say here."""

    name: str  # as a person knows it: "GPU 0"
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    clock_reasons: tuple[str, ...] | None = None  # why the clock is not higher, in the words of trtx doctor
    power_w: float | None = None
    temperature_c: int | None = None
    memory_used_bytes: int | None = None
    foreign: tuple[ForeignProcess, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A topology at one moment."""

    at_ns: int  # since 1970
    gpus: tuple[GpuReading, ...] | None  # those that it uses; None: they can't be read
    ended_requests: dict[str, dict[str, int]] | None  # so far, by role and worker; None: not every worker says
    # So far, by role and worker, of those that take pictures; None: none does, or one of them does not say.
    pictures: dict[str, dict[str, PictureCounts]] | None = None
    # So far, by decode worker and prefill worker; empty: it has no decode workers; None: one of them does not say.
    handoffs: dict[str, dict[str, HandoffCounts]] | None = None
    cpu: CpuReading | None = None  # of the machine that the reader is on; None: the kernel does not say


@dataclass(frozen=True, slots=True)
class TrialReadings:
    """The form of the file, in the order of time."""

    readings: tuple[ServerReading, ...]


def write_readings(directory: Path, readings: Sequence[ServerReading]) -> None:
    """Of one trial, a reading a line. Raises OSError."""
    fields = READINGS.versioned(plain(TrialReadings(tuple(readings))))
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in fields["readings"])
    text = f'{{"schema_version": {fields["schema_version"]}, "readings": [\n{lines}\n]}}\n'
    write_text(directory / READINGS.file, text)


def read_readings(directory: Path) -> tuple[ServerReading, ...] | None:
    """Of one trial; None where nobody read anything. Or UsageError: file and field."""
    found = READINGS.find(directory, TrialReadings)
    return None if found is None else found.readings


def gpus_over(readings: Sequence[ServerReading], measured: Span) -> tuple[GpuReading, ...] | None:
    """Every reading of every GPU from one edge of a measured part to the other; None where an edge has none."""
    around = _around(readings, measured)
    if around is None:
        return None
    found = [one.gpus for one in around]
    known = [gpus for gpus in found if gpus is not None]
    # In between some may be lacking, as NVML answers in its own time. At the edges it is what "throughout" means.
    return None if found[0] is None or found[-1] is None else tuple(gpu for gpus in known for gpu in gpus)


def cpu_over(readings: Sequence[ServerReading], measured: Span) -> CpuUse | None:
    """How cores were used from one edge of a measured part to the other; None where an edge has no reading of them."""
    around = _around(readings, measured)
    if around is None or around[0].cpu is None or around[-1].cpu is None:
        return None
    return cores.used([one.cpu for one in around if one.cpu is not None])


def requests_over(readings: Sequence[ServerReading], measured: Span, answered: int) -> dict[str, dict[str, int]] | None:
    """Requests that ended in each worker in a measured part, by role and worker.

    None where a worker did not say, or all of them together saw fewer than the ``answered`` requests: then others did
    the work, as behind a forwarded port.

    Until its last reading, as nothing else is sent in a trial, and a worker counts a request a moment after its client
    has the answer. From up to some seconds before its start: a few may be of the warm-up.
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
        return None  # it was started again, and counts from 0
    seen = max((sum(counts.values()) for counts in counted.values()), default=0)
    return counted if seen >= answered else None


def pictures_over(readings: Sequence[ServerReading], measured: Span) -> dict[str, PictureCounts] | None:
    """What became of the pictures of a measured part, by role: from the last reading before it to the last of all, as
    :func:`requests_over`. None where workers did not say."""
    around = _around(readings, measured)
    return None if around is None else grown(around[0].pictures, readings[-1].pictures)


def handoffs_over(readings: Sequence[ServerReading], measured: Span) -> dict[str, dict[str, HandoffCounts]] | None:
    """What became of the KV of a measured part's requests, by decode and prefill worker, as :func:`pictures_over`."""
    around = _around(readings, measured)
    return None if around is None else handoffs.grown(around[0].handoffs, readings[-1].handoffs)


def summed(counts: Sequence[WorkerCounts]) -> dict[str, dict[str, int]]:
    """Over trials, by role and worker."""
    total: dict[str, Counter[str]] = {}
    for of_trial in counts:
        for role, by_worker in of_trial.items():
            total.setdefault(role, Counter()).update(by_worker)
    return {role: dict(by_worker) for role, by_worker in total.items()}


def _workers(counts: WorkerCounts) -> set[tuple[str, str]]:
    return {(role, worker) for role, by_worker in counts.items() for worker in by_worker}


def _around(readings: Sequence[ServerReading], measured: Span) -> Sequence[ServerReading] | None:
    """Those from the last before a part to the first after it; None where either is far from it, or there is none."""
    before = [place for place, one in enumerate(readings) if one.at_ns <= measured.start_ns]
    after = [place for place, one in enumerate(readings) if one.at_ns >= measured.end_ns]
    if not before or not after:
        return None
    first, last = before[-1], after[0]
    if measured.start_ns - readings[first].at_ns > _EDGE_NS or readings[last].at_ns - measured.end_ns > _EDGE_NS:
        return None
    return readings[first : last + 1]

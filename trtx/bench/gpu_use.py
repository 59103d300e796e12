"""What the GPUs of a topology did in one part of a trial, from the readings taken meanwhile. Pure.

Joules are the increase of NVML's energy counter, which covers all the time between two readings. An edge of the part
lies between two readings: their increase counts by the share of its time that lies in the part. Utilization, power and
memory are samples; each represents the time since the reading before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from trtx.bench.draft_counters import DraftCounts, of_records
from trtx.bench.phases import Span, input_tokens_in, is_in_flight_within, output_tokens_in
from trtx.bench.readings import EDGE_NS, GpuReading, ServerReading, drafts_over
from trtx.bench.records import RequestRecord

NO_GPU = "the topology uses no GPU"
_UNREAD = "no GPU was read; trtx reads the GPUs of the topologies that it serves, through NVML"
_UNCOVERED = f"readings are missing for more than {EDGE_NS / 1e9:g} s"
_UNCOUNTED = "answers carry no usage, so their tokens are not known"
_UNCOUNTED_GPUS = "the cost is not known, because the number of GPUs is not known"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The GPUs of a topology over one part of a trial. None: not known, and ``reasons`` say why."""

    energy_j: float | None = None  # of all GPUs
    utilization_percent: float | None = None  # mean over GPUs and time
    peak_utilization_percent: float | None = None  # of one GPU
    peak_power_w: float | None = None  # of all GPUs at one moment
    peak_power_of_one_w: float | None = None
    peak_memory_bytes: float | None = None  # of one GPU
    reasons: tuple[str, ...] = ()  # one clause each


@dataclass(frozen=True, slots=True)
class PricedGpus:
    """The GPUs of a topology, and the price of an hour of one of them."""

    count: int | None  # None: not known
    hour_price: float | None  # in any currency; None: no price was given


@dataclass(frozen=True, slots=True)
class GpuPart:
    """One part of a trial, with all inputs of the metrics that come from the server's readings."""

    duration_s: float
    input_tokens: float | None  # of successful requests, as counted by the server; None: not all are known
    output_tokens: float | None
    use: GpuUse
    gpus: PricedGpus
    drafts: DraftCounts | None = None  # None: the topology doesn't speculate, or that is not known

    @classmethod
    def of_trial(cls, records: Sequence[RequestRecord], readings: Sequence[ServerReading], gpus: PricedGpus) -> GpuPart:
        """The part from the first request's start to the last one's end."""
        span = Span(min(record.start_ns for record in records), max(record.end_ns for record in records))
        served = [record for record in records if record.succeeded]
        lengths = [(record.input_sequence_length, record.output_sequence_length) for record in served]
        return cls._of(span, served, lengths, readings, gpus)

    @classmethod
    def of_span(
        cls, records: Sequence[RequestRecord], span: Span, readings: Sequence[ServerReading], gpus: PricedGpus
    ) -> GpuPart:
        """The part in ``span``, with the tokens that were computed in it."""
        served = [record for record in records if record.succeeded and is_in_flight_within(record, span)]
        lengths = [
            (
                None if record.input_sequence_length is None else input_tokens_in(record, span),
                None if record.output_sequence_length is None else output_tokens_in(record, span),
            )
            for record in served
        ]
        sent = [record for record in served if span.has(record.start_ns)]
        return cls._of(span, sent, lengths, readings, gpus)

    @classmethod
    def _of(
        cls,
        span: Span,
        served: Sequence[RequestRecord],
        lengths: Sequence[tuple[float | None, float | None]],
        readings: Sequence[ServerReading],
        gpus: PricedGpus,
    ) -> GpuPart:
        inputs, outputs = _total([one for one, _ in lengths]), _total([one for _, one in lengths])
        use = GpuUse(reasons=(NO_GPU,)) if gpus.count == 0 else gpu_use(readings, span)
        drafts = drafts_over(readings, span) or of_records(served)
        return cls(span.duration_s, inputs, outputs, use, gpus, drafts)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason why GPU metrics of the part are not known, one clause each."""
        reasons = list(self.use.reasons)
        if None in (self.input_tokens, self.output_tokens):
            reasons.append(_UNCOUNTED)
        if self.gpus.hour_price is not None and self.gpus.count is None:
            reasons.append(_UNCOUNTED_GPUS)
        return tuple(reasons)


def reasons_over(parts: Sequence[GpuPart]) -> tuple[str, ...]:
    """Returns why GPU metrics of a cell are not known, one clause each.

    A reason that holds only for some trials names the first of them.
    """
    found = [part.reasons for part in parts]
    every = dict.fromkeys(reason for reasons in found for reason in reasons)
    first = {reason: next(number for number, of in enumerate(found, 1) if reason in of) for reason in every}
    return tuple(
        reason if all(reason in of for of in found) else f"trial {first[reason]}: {reason}" for reason in every
    )


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is not known, or if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def gpu_use(readings: Sequence[ServerReading], span: Span) -> GpuUse:
    """What the GPUs did in ``span``, from all readings of its trial in order of time."""
    known = [(one.at_ns, one.gpus) for one in readings if one.gpus]
    if not known:
        return GpuUse(reasons=(NO_GPU if any(one.gpus == () for one in readings) else _UNREAD,))
    if len({tuple(gpu.name for gpu in gpus) for _, gpus in known}) > 1:
        return GpuUse(reasons=("readings name different GPUs",))
    times = [at_ns for at_ns, _ in known]
    around = known[max(0, bisect_right(times, span.start_ns) - 1) : bisect_left(times, span.end_ns) + 1]
    if (shared := _shared([gpu for _, gpus in around for gpu in gpus])) is not None:
        return GpuUse(reasons=(shared,))
    energies = [_energy_of(of_gpu, span) for of_gpu in zip(*(gpus for _, gpus in known), strict=True)]
    told = [one for one in energies if isinstance(one, str)]
    energy = None if told else sum(one for one in energies if not isinstance(one, str))
    weights = represented(times, span)
    if weights is None:
        return GpuUse(energy, reasons=tuple(dict.fromkeys((*told, _UNCOVERED))))
    sampled = [(weight_ns, gpu) for place, weight_ns in weights for gpu in known[place][1]]
    shares = [(weight_ns, gpu.utilization_percent) for weight_ns, gpu in sampled]
    mean = _total([None if share is None else weight_ns * share for weight_ns, share in shares])
    peaks = {
        "utilization": _peak([share for _, share in shares]),
        "power": _peak([gpu.power_w for _, gpu in sampled]),
        "memory": _peak([gpu.memory_used_bytes for _, gpu in sampled]),
    }
    told += [f"NVML does not report the {what} of a GPU" for what, peak in peaks.items() if peak is None]
    return GpuUse(
        energy_j=energy,
        utilization_percent=None if mean is None else mean / sum(weight_ns for weight_ns, _ in shares),
        peak_utilization_percent=peaks["utilization"],
        peak_power_w=_peak([_total([gpu.power_w for gpu in known[place][1]]) for place, _ in weights]),
        peak_power_of_one_w=peaks["power"],
        peak_memory_bytes=peaks["memory"],
        reasons=tuple(dict.fromkeys(told)),
    )


def energy_in(counter: Sequence[tuple[int, float]], span: Span) -> float | None:
    """The increase, in J, of an energy counter in ``span``. None if it is not known at an edge, or was reset.

    ``counter``: its values in J, each with its time in ns, in order of time. Adds the increases between readings; an
    increase at an edge counts by its share in the span. The counter has run since the driver was loaded, so a
    difference of two large interpolated values would lose digits.
    """
    times = [at_ns for at_ns, _ in counter]
    if span.end_ns <= span.start_ns:
        return None
    first, last = bisect_right(times, span.start_ns) - 1, bisect_left(times, span.end_ns)
    if first < 0 or last == len(times):
        return None
    if span.start_ns - times[first] > EDGE_NS or times[last] - span.end_ns > EDGE_NS:
        return None
    if any(now < before for (_, before), (_, now) in pairwise(counter[first : last + 1])):
        return None
    return fsum(
        (joules - joules_before) * (inside_ns / (at_ns - before_ns))
        for (before_ns, joules_before), (at_ns, joules) in pairwise(counter[first : last + 1])
        if (inside_ns := min(at_ns, span.end_ns) - max(before_ns, span.start_ns)) > 0
    )


def represented(times: Sequence[int], span: Span) -> list[tuple[int, int]] | None:
    """The readings that represent ``span``: the place of each, and for how many ns of the span it counts.

    A reading counts for the time since the reading before it. None if a part of the span is more than EDGE_NS away
    from a reading after it.
    """
    first, last = bisect_right(times, span.start_ns) - 1, bisect_left(times, span.end_ns)
    if first < 0 or last == len(times):
        return None
    if any(now - before > EDGE_NS for before, now in pairwise(times[first : last + 1])):
        return None
    return [
        (place, weight_ns)
        for place in range(first + 1, last + 1)
        if (weight_ns := min(times[place], span.end_ns) - max(times[place - 1], span.start_ns)) > 0
    ]


def _energy_of(gpu: Sequence[GpuReading], span: Span) -> float | str:
    """The energy of one GPU in J, or why it isn't known, as a clause."""
    counter = [(one.energy_at_ns, one.energy_j) for one in gpu]
    known = [(at_ns, joules) for at_ns, joules in counter if at_ns is not None and joules is not None]
    if not known:
        return f"NVML does not report the energy of {gpu[0].name}"
    if (found := energy_in(known, span)) is not None:
        return found
    if any(now < before for (_, before), (_, now) in pairwise(known)):
        return f"the energy counter of {gpu[0].name} was reset"
    return _UNCOVERED


def _shared(gpus: Sequence[GpuReading]) -> str | None:
    """A clause that names a process outside of the topology on one of its GPUs; None if none was seen."""
    for gpu in gpus:
        for process in gpu.foreign or ():
            who = f"{process.name or 'a process'} (pid {process.pid})"
            return f"{who} outside of the topology was on {gpu.name}, and its share is not known"
    return None


def _peak(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None

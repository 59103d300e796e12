"""What is known of how one cell was measured. What nobody observed is None, which is not the same as nothing found.

Aiperf's records say most of it; whoever serves the topology says of it what records can't. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trtx.bench.cores import CpuUse
from trtx.bench.handoffs import HandoffsByPair
from trtx.bench.readings import GpuReading, WorkerCounts
from trtx.bench.records import RequestRecord, TrialRecords
from trtx.bench.windows import NoSteadyPart, Phases, phases_of, sent_in

# aiperf 0.13.0, EventLoopMonitor, in the log of a run. It looks every 250 ms and tells of delays above 25 ms.
_EVENT_LOOP = re.compile(r"Event loop for (\S+) is taking too long to run\. Overhead: ([\d,.]+)ms")


@dataclass(frozen=True, slots=True)
class AskedLength:
    """Tokens of each request that the load asked for."""

    mean: float
    stddev: float = 0.0
    slack: float = 0.0  # tokens that the load leaves open, as the chat template's of a second message


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of one cell, all its trials."""

    trials: tuple[TrialRecords, ...]
    concurrency: int | None  # requests kept in flight; None: they came at a rate, by a schedule or after pauses
    model: str | None = None  # that was asked for
    input_length: AskedLength | None = None  # None: the load asks for none, as a dataset does
    output_length: AskedLength | None = None  # None: answers end by themselves
    has_images: bool = False  # usage counts what they expand to with the text's tokens
    percentiles: tuple[int, ...] = (50,)  # that something is concluded from
    prompts: Literal["unique", "shared"] | None = None  # whether the load repeats prompts or their beginnings
    restarted: tuple[str, ...] | None = None  # processes that were started again while it was measured
    requests_by_worker: WorkerCounts | None = None  # that ended while it was measured
    handoffs: HandoffsByPair | None = None  # of the requests that ended while it was measured; empty: none are made
    routes_by_prefix: bool | None = None  # whether the router prefers workers that hold a prompt's beginning
    event_loop_delays_ms: Mapping[str, tuple[float, ...]] | None = None  # of the client's services
    gpus: tuple[GpuReading, ...] | None = None  # throughout each trial's measured part, in its order; empty: no GPU
    cpu: CpuUse | None = None  # throughout each trial's measured part

    @cached_property
    def phases(self) -> tuple[Phases | NoSteadyPart, ...]:
        """Of each trial's measured requests."""
        return tuple(self._phases(trial.measured) for trial in self.trials)

    @cached_property
    def warm_up_phases(self) -> tuple[Phases | NoSteadyPart, ...]:
        return tuple(self._phases(trial.warm_up) for trial in self.trials)

    @cached_property
    def steady(self) -> tuple[list[RequestRecord], ...]:
        """Of each trial, the measured requests sent in its steady part; none where it has no such part."""
        return tuple(
            sent_in(trial.measured, phases.steady) if isinstance(phases, Phases) else []
            for trial, phases in zip(self.trials, self.phases, strict=True)
        )

    @property
    def answered(self) -> list[RequestRecord]:
        """All measured requests that succeeded."""
        return [record for trial in self.trials for record in trial.measured if record.succeeded]

    def _phases(self, records: tuple[RequestRecord, ...]) -> Phases | NoSteadyPart:
        return phases_of(records, self.concurrency)


def event_loop_delays_ms(log: str) -> dict[str, tuple[float, ...]]:
    """How long the loops of aiperf's services were blocked, by service: in ms, one for each warning of its log."""
    found: dict[str, tuple[float, ...]] = {}
    for service, delay in _EVENT_LOOP.findall(log):
        found[service] = (*found.get(service, ()), float(delay.replace(",", "")))
    return found

"""The evidence about how one cell was measured. None means "not observed", which differs from "nothing found".

Most of it comes from aiperf's records. The process that serves the topology adds the rest, such as restarts and GPU
clocks. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trtx.bench.cores import CpuUse
from trtx.bench.handoffs import HandoffsByPair
from trtx.bench.phases import NoSteadyPart, Phases, phases_of, sent_in
from trtx.bench.readings import GpuReading, WorkerCounts
from trtx.bench.records import RequestRecord, TrialRecords

# The warning of aiperf 0.13.0's EventLoopMonitor, which measures every 250 ms and logs delays above 25 ms.
_EVENT_LOOP = re.compile(r"Event loop for (\S+) is taking too long to run\. Overhead: ([\d,.]+)ms")


@dataclass(frozen=True, slots=True)
class AskedLength:
    """The number of tokens that the load requests, per request."""

    mean: float
    stddev: float = 0.0
    slack: float = 0.0  # tokens that the load does not specify, e.g. the template tokens of a second message


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence about one cell, over all its trials."""

    trials: tuple[TrialRecords, ...]
    concurrency: int | None  # requests kept in flight; None: arrivals follow a rate, a schedule or pauses
    model: str | None = None  # the requested model
    input_length: AskedLength | None = None  # None: the load requests none (a dataset, for example)
    output_length: AskedLength | None = None  # None: the model may stop by itself
    has_images: bool = False  # usage counts image tokens together with text tokens
    asks_formats: bool = False  # requests may ask for structured output or offer tools
    percentiles: tuple[int, ...] = (50,)  # percentiles on which a conclusion rests
    prompts: Literal["unique", "shared"] | None = None  # whether prompts, or their prefixes, repeat
    restarted: tuple[str, ...] | None = None  # processes restarted during the measurement
    requests_by_worker: WorkerCounts | None = None  # requests that ended during the measurement
    handoffs: HandoffsByPair | None = None  # of requests that ended during the measurement; empty: no handoffs
    routes_by_prefix: bool | None = None  # whether the router prefers workers that cache a prompt's prefix
    event_loop_delays_ms: Mapping[str, tuple[float, ...]] | None = None  # of aiperf's services
    gpus: tuple[GpuReading, ...] | None = None  # over each trial's measured part, in order; empty: no GPU
    cpu: CpuUse | None = None  # over each trial's measured part

    @cached_property
    def phases(self) -> tuple[Phases | NoSteadyPart, ...]:
        """The phases of each trial's measured requests."""
        return tuple(self._phases(trial.measured) for trial in self.trials)

    @cached_property
    def warm_up_phases(self) -> tuple[Phases | NoSteadyPart, ...]:
        return tuple(self._phases(trial.warm_up) for trial in self.trials)

    @cached_property
    def steady(self) -> tuple[list[RequestRecord], ...]:
        """For each trial, the measured requests sent in its steady part; empty if it has none."""
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
    """How long the event loops of aiperf's services were blocked: ms per warning in its log, by service."""
    found: dict[str, tuple[float, ...]] = {}
    for service, delay in _EVENT_LOOP.findall(log):
        found[service] = (*found.get(service, ()), float(delay.replace(",", "")))
    return found

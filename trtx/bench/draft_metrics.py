"""The metrics of speculation, one formula each, over whole trials and over steady parts.

The counts come from the workers' counters, or from the usage of each answer if the server's workers can't be read.
The counts of all trials are added. If a trial has no counts, the cell has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.bench.draft_counters import DraftCounts, over_trials
from trtx.bench.gpu_use import GpuPart
from trtx.bench.metric_types import MeasuredMetric, Records, metric
from trtx.bench.metrics import Heading
from trtx.bench.phases import Span

_SINCE = 8  # version of cell.json


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftNumber(MeasuredMetric[float | None]):
    """A number of speculation, whose formula gets the counts over all trials."""

    def over(self, trials: Sequence[Records]) -> Any:
        return None  # the counters are in the readings, not in the records

    def over_parts(self, trials: Sequence[Records], spans: Sequence[Span] | None, gpus: Sequence[GpuPart]) -> Any:
        counts = over_trials([part.drafts for part in gpus])
        return None if counts is None else self.formula(counts)


def _of_drafts(**fields: Any) -> Callable[[Callable[[DraftCounts], float | None]], DraftNumber]:
    return metric(DraftNumber, since=_SINCE, if_known=True, heading=Heading.SPECULATION, **fields)


@_of_drafts(
    title="acceptance length",
    unit="tokens",
    meaning="1 + accepted tokens / drafts, where a draft is a request with drafted tokens in one step",
    better="higher",
    label="length",
    markdown=[None],
)
def spec_decode_token_weighted_acceptance_length(counts: DraftCounts) -> float | None:
    return counts.acceptance_length


@_of_drafts(
    title="acceptance rate",
    unit="%",
    meaning="accepted tokens / drafted tokens × 100",
    better="higher",
    label="rate, %",
    markdown=[None],
)
def spec_decode_overall_draft_acceptance_rate(counts: DraftCounts) -> float | None:
    return counts.acceptance_rate


@_of_drafts(
    title="tokens a step",
    unit="tokens",
    meaning="tokens of one request in a decode step, with a draft or without; 1 without speculation",
    better="higher",
    label="tokens a step",
)
def decoded_tokens_per_step(counts: DraftCounts) -> float | None:
    return counts.tokens_per_step


@_of_drafts(
    title="draft overhead",
    unit="%",
    meaning="time that drafting took on the host / duration of all steps × 100",
    better="lower",
    label="overhead, %",
)
def draft_overhead(counts: DraftCounts) -> float | None:
    return counts.overhead


ACCEPTANCE = (spec_decode_token_weighted_acceptance_length, spec_decode_overall_draft_acceptance_rate)

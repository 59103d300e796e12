"""Speculation counters of the workers: drafted and accepted tokens, in the form of TensorRT-LLM's specDecodingStats.

Pure. A worker's counters grow from its start; a trial's counts are their increase during its measured part. If the
workers' metrics can't be read, the counts of each request in aiperf's records are used, which some servers (vLLM) send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from trtx.bench.records import RequestRecord, read_also

N = TypeVar("N", int, float)
STEPS, DRAFTED, ACCEPTED = "spec_decode_steps", "spec_decode_draft_tokens", "spec_decode_accepted_draft_tokens"
read_also((STEPS, DRAFTED, ACCEPTED))  # aiperf 0.13.0: metrics/types/spec_decode_metrics.py


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of one worker since its start, or of all workers over a trial. None: not counted."""

    drafts: int = 0  # requests with drafted tokens, summed over steps
    drafted: int = 0  # tokens
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()  # tokens by position in the draft; empty: not counted by position
    accepted_at: tuple[int, ...] = ()
    decodes: int | None = None  # requests past their prompt, summed over steps, with drafts or without
    drafting_s: float | None = None
    step_s: float | None = None  # duration of all steps

    def since(self, before: DraftCounts) -> DraftCounts | None:
        """The increase since ``before``; None if a counter fell, because the worker was restarted."""
        found = _joined(self, before, -1)
        return found if found._is_growth else None

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return _joined(self, other, 1)

    @property
    def _is_growth(self) -> bool:
        numbers = (self.drafts, self.drafted, self.accepted, self.decodes, self.drafting_s, self.step_s)
        return all(one is None or one >= 0 for one in (*numbers, *self.drafted_at, *self.accepted_at))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a request in a step that verified its draft; None without drafts."""
        return (self.accepted + self.drafts) / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Percentage of drafted tokens that were accepted; None if no tokens were drafted."""
        return 100 * self.accepted / self.drafted if self.drafted else None

    @property
    def rates_at(self) -> tuple[float | None, ...]:
        """:attr:`acceptance_rate` by position in the draft."""
        return tuple(
            100 * accepted / drafted if drafted else None
            for drafted, accepted in zip(self.drafted_at, self.accepted_at, strict=True)
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a request in a decode step, with a draft or without."""
        return (self.decodes + self.accepted) / self.decodes if self.decodes else None

    @property
    def overhead(self) -> float | None:
        """Percentage of the steps' time that drafting took on the host."""
        return None if self.drafting_s is None or not self.step_s else 100 * self.drafting_s / self.step_s


DraftsByWorker = Mapping[str, Mapping[str, DraftCounts]]  # by role, then by worker


def grown(first: DraftsByWorker | None, last: DraftsByWorker | None) -> DraftCounts | None:
    """The increase over all workers between two readings.

    None if no worker counts drafts, if a worker has stopped counting them, or if a counter was reset. A worker that is
    only in ``last`` started with counts of 0.
    """
    if first is None or not last or any(first[role].keys() - last.get(role, {}).keys() for role in first):
        return None
    total = DraftCounts(decodes=0, drafting_s=0.0, step_s=0.0)
    for role, by_worker in last.items():
        for worker, counts in by_worker.items():
            before = first.get(role, {}).get(worker)
            if (found := counts if before is None else counts.since(before)) is None:
                return None
            total += found
    return total


def of_records(records: Sequence[RequestRecord]) -> DraftCounts | None:
    """The counts that a server reported with its answers; None if it reported none."""
    found = [(one.value(STEPS), one.value(DRAFTED), one.value(ACCEPTED)) for one in records if one.succeeded]
    known = [one for one in found if None not in one]
    if not known:
        return None
    drafts, drafted, accepted = (round(sum(values)) for values in zip(*known, strict=True))
    return DraftCounts(drafts, drafted, accepted)


def over_trials(trials: Sequence[DraftCounts | None]) -> DraftCounts | None:
    """Counts over all trials; None if a trial has none or there is no trial."""
    known = [one for one in trials if one is not None]
    if not known or len(known) < len(trials):
        return None
    total = known[0]
    for one in known[1:]:
        total += one
    return total


def _joined(one: DraftCounts, other: DraftCounts, sign: int) -> DraftCounts:
    return DraftCounts(
        drafts=one.drafts + sign * other.drafts,
        drafted=one.drafted + sign * other.drafted,
        accepted=one.accepted + sign * other.accepted,
        drafted_at=_by_position(one.drafted_at, other.drafted_at, sign),
        accepted_at=_by_position(one.accepted_at, other.accepted_at, sign),
        decodes=_known(one.decodes, other.decodes, sign),
        drafting_s=_known(one.drafting_s, other.drafting_s, sign),
        step_s=_known(one.step_s, other.step_s, sign),
    )


def _by_position(one: Sequence[int], other: Sequence[int], sign: int) -> tuple[int, ...]:
    return tuple(left + sign * right for left, right in zip_longest(one, other, fillvalue=0))


def _known(one: N | None, other: N | None, sign: int) -> N | None:
    return None if one is None or other is None else one + sign * other

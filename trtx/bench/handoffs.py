"""What decode workers tell of the handoffs of a trial: for which requests KV came, and for which it did not.

Pure. Counters of a worker grow from its start; a trial's are what they grew by while it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

NO_PREFILL = ""
"""In place of a prefill worker's name: of the requests that none had."""


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Requests that ended in one decode worker, of those from one prefill worker: since it began, or over a trial."""

    read: int = 0  # KV came
    nothing: int = 0  # none had to: the own prefix cache had the prompt
    recomputed: int = 0  # none came that had to: the prompt was computed a second time
    unknown: int = 0  # the engine does not say
    whole: int = 0  # no prefill worker had the request, so the decode worker computed its prompt
    bytes: int = 0  # of KV that came
    seconds: float = 0.0  # of the reads, summed

    def since(self, before: HandoffCounts) -> HandoffCounts | None:
        """What came after ``before``; None where a counter fell, as of a worker that was started again."""
        found = {one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)}
        return None if any(value < 0 for value in found.values()) else HandoffCounts(**found)

    def __add__(self, other: HandoffCounts) -> HandoffCounts:
        return HandoffCounts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def requests(self) -> int:
        return self.read + self.nothing + self.lost + self.unknown

    @property
    def lost(self) -> int:
        """Requests of a decode worker that had no KV from a prefill worker, and should have had."""
        return self.recomputed + self.whole


HandoffsByPair = Mapping[str, Mapping[str, HandoffCounts]]  # by decode worker, then by prefill worker


def grown(first: HandoffsByPair | None, last: HandoffsByPair | None) -> dict[str, dict[str, HandoffCounts]] | None:
    """By pair, between two readings; None where they are not of the same decode workers, or one counts anew. Empty: of
    a topology that hands nothing over."""
    if first is None or last is None or first.keys() != last.keys():
        return None
    total: dict[str, dict[str, HandoffCounts]] = {}
    for decode, pairs in last.items():
        if first[decode].keys() - pairs.keys():
            return None
        for prefill, counts in pairs.items():
            found = counts.since(first[decode].get(prefill, HandoffCounts()))
            if found is None:
                return None
            total.setdefault(decode, {})[prefill] = found
    return total


def over_trials(trials: Sequence[HandoffsByPair | None]) -> dict[str, dict[str, HandoffCounts]] | None:
    """By pair; None where one of the trials tells nothing, or there is none."""
    total: dict[str, dict[str, HandoffCounts]] = {}
    for of_trial in trials:
        if of_trial is None:
            return None
        for decode, pairs in of_trial.items():
            of_decode = total.setdefault(decode, {})
            for prefill, counts in pairs.items():
                of_decode[prefill] = of_decode.get(prefill, HandoffCounts()) + counts
    return total if trials else None


def told_pair(decode: str, prefill: str) -> str:
    """A pair as a person knows it."""
    return f"{prefill or 'no prefill worker'} to {decode}"

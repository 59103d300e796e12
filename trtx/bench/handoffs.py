"""KV handoff counters of the decode workers: for which requests KV arrived from a prefill worker.

Pure. A worker's counters grow from its start; a trial's counts are their increase during its measured part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

NO_PREFILL = ""
"""Key that replaces the prefill worker's name for requests that had no prefill worker."""


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Requests that ended on one decode worker and came from one prefill worker, since the worker's start or over a
    trial.
    """

    read: int = 0  # KV arrived
    nothing: int = 0  # no KV was needed: the worker's own prefix cache held the prompt
    recomputed: int = 0  # needed KV didn't arrive, so the prompt was computed again
    unknown: int = 0  # the engine doesn't report it
    whole: int = 0  # no prefill worker had the request, so the decode worker computed its prompt
    local: int = 0  # the router left the prompt to the decode worker (``--conditional-disagg``)
    bytes: int = 0  # of KV that arrived
    seconds: float = 0.0  # total duration of the reads

    def since(self, before: HandoffCounts) -> HandoffCounts | None:
        """The increase since ``before``; None if a counter fell, because the worker was restarted."""
        found = {one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)}
        return None if any(value < 0 for value in found.values()) else HandoffCounts(**found)

    def __add__(self, other: HandoffCounts) -> HandoffCounts:
        return HandoffCounts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def requests(self) -> int:
        return self.read + self.nothing + self.lost + self.local + self.unknown

    @property
    def lost(self) -> int:
        """Requests without KV from a prefill worker that should have had it."""
        return self.recomputed + self.whole


HandoffsByPair = Mapping[str, Mapping[str, HandoffCounts]]  # by decode worker, then by prefill worker


def grown(first: HandoffsByPair | None, last: HandoffsByPair | None) -> dict[str, dict[str, HandoffCounts]] | None:
    """The increase per pair between two readings.

    None if the readings cover different decode workers or a counter was reset. Empty for a topology without handoffs.
    """
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
    """Counts per pair over all trials; None if a trial has none or there is no trial."""
    total: dict[str, dict[str, HandoffCounts]] = {}
    for of_trial in trials:
        if of_trial is None:
            return None
        for decode, pairs in of_trial.items():
            of_decode = total.setdefault(decode, {})
            for prefill, counts in pairs.items():
                of_decode[prefill] = of_decode.get(prefill, HandoffCounts()) + counts
    return total if trials else None


def pair_text(decode: str, prefill: str) -> str:
    """A pair of workers, as text for the user."""
    return f"{prefill or 'no prefill worker'} to {decode}"

"""What workers tell of the pictures of a trial: where their time went, and what the embedding caches found.

Pure. Counters of a worker grow from its start; a trial's are what they grew by while it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class PictureCounts:
    """Of one worker since it began, or of a role over a trial."""

    lookups: Mapping[str, int]  # in the embedding cache, by outcome: hit, joined, miss
    pictures: Mapping[
        str, int
    ]  # that passed a stage: prepare, encode, remote, put; of fetch, those of a request as one
    seconds: Mapping[str, float]  # that they took in it, summed

    def since(self, before: PictureCounts) -> PictureCounts | None:
        """What came after ``before``; None where a counter fell, as of a worker that was started again."""
        found = PictureCounts(
            {name: count - before.lookups.get(name, 0) for name, count in self.lookups.items()},
            {name: count - before.pictures.get(name, 0) for name, count in self.pictures.items()},
            {name: value - before.seconds.get(name, 0.0) for name, value in self.seconds.items()},
        )
        grown = (*found.lookups.values(), *found.pictures.values(), *found.seconds.values())
        return None if any(value < 0 for value in grown) else found

    def __add__(self, other: PictureCounts) -> PictureCounts:
        return PictureCounts(
            _added(self.lookups, other.lookups),
            _added(self.pictures, other.pictures),
            _added(self.seconds, other.seconds),
        )

    @property
    def asked(self) -> int:
        """Pictures that were looked for in the cache."""
        return sum(self.lookups.values())

    @property
    def hit_rate(self) -> float | None:
        """% of them that were there, or being made for another request; None where none was looked for."""
        return 100 * (self.asked - self.lookups.get("miss", 0)) / self.asked if self.asked else None

    def ms(self, stage: str) -> float | None:
        """Mean time of a picture in a stage, in fetch of a request's; None where none passed it."""
        count = self.pictures.get(stage, 0)
        return 1000 * self.seconds.get(stage, 0.0) / count if count else None


CountsByWorker = Mapping[str, Mapping[str, PictureCounts]]  # by role, then by worker


def grown(first: CountsByWorker | None, last: CountsByWorker | None) -> dict[str, PictureCounts] | None:
    """By role, between two readings; None where they are not of the same workers, or one counts anew."""
    if not first or not last or _workers(first) != _workers(last):
        return None
    total: dict[str, PictureCounts] = {}
    for role, by_worker in last.items():
        for worker, counts in by_worker.items():
            if (found := counts.since(first[role][worker])) is None:
                return None
            total[role] = total[role] + found if role in total else found
    return total


def over_trials(trials: Sequence[Mapping[str, PictureCounts] | None]) -> dict[str, PictureCounts] | None:
    """By role; None where one of the trials, or all of them, tell nothing."""
    total: dict[str, PictureCounts] = {}
    for of_trial in trials:
        if of_trial is None:
            return None
        for role, counts in of_trial.items():
            total[role] = total[role] + counts if role in total else counts
    return total or None


def _added(one: Mapping[str, N], other: Mapping[str, N]) -> dict[str, N]:
    return {name: sum(counts[name] for counts in (one, other) if name in counts) for name in {**one, **other}}


def _workers(counts: CountsByWorker) -> set[tuple[str, str]]:
    return {(role, worker) for role, by_worker in counts.items() for worker in by_worker}

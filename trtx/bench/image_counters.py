"""Image counters of the workers: time per stage, and hits of the embedding caches.

Pure. A worker's counters grow from its start; a trial's counts are their increase during its measured part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """Counters of one worker since its start, or of a role over a trial."""

    lookups: Mapping[str, int]  # in the embedding cache, by outcome: hit, joined, miss
    pictures: Mapping[
        str, int
    ]  # images by stage: prepare, encode, remote, put; fetch counts the images of a request as one
    seconds: Mapping[str, float]  # total time by stage

    def since(self, before: ImageCounts) -> ImageCounts | None:
        """The increase since ``before``; None if a counter fell, because the worker was restarted."""
        found = ImageCounts(
            {name: count - before.lookups.get(name, 0) for name, count in self.lookups.items()},
            {name: count - before.pictures.get(name, 0) for name, count in self.pictures.items()},
            {name: value - before.seconds.get(name, 0.0) for name, value in self.seconds.items()},
        )
        grown = (*found.lookups.values(), *found.pictures.values(), *found.seconds.values())
        return None if any(value < 0 for value in grown) else found

    def __add__(self, other: ImageCounts) -> ImageCounts:
        return ImageCounts(
            _added(self.lookups, other.lookups),
            _added(self.pictures, other.pictures),
            _added(self.seconds, other.seconds),
        )

    @property
    def looked_up(self) -> int:
        """Number of images looked up in the cache."""
        return sum(self.lookups.values())

    @property
    def hit_rate(self) -> float | None:
        """Percentage of lookups that hit or joined another request's computation; None without lookups."""
        return 100 * (self.looked_up - self.lookups.get("miss", 0)) / self.looked_up if self.looked_up else None

    def ms(self, stage: str) -> float | None:
        """Mean time per image in a stage (in fetch: per request); None if no image passed the stage."""
        count = self.pictures.get(stage, 0)
        return 1000 * self.seconds.get(stage, 0.0) / count if count else None


CountsByWorker = Mapping[str, Mapping[str, ImageCounts]]  # by role, then by worker


def grown(first: CountsByWorker | None, last: CountsByWorker | None) -> dict[str, ImageCounts] | None:
    """The increase per role between two readings; None if their workers differ or a counter was reset."""
    if not first or not last or _workers(first) != _workers(last):
        return None
    total: dict[str, ImageCounts] = {}
    for role, by_worker in last.items():
        for worker, counts in by_worker.items():
            if (found := counts.since(first[role][worker])) is None:
                return None
            total[role] = total[role] + found if role in total else found
    return total


def over_trials(trials: Sequence[Mapping[str, ImageCounts] | None]) -> dict[str, ImageCounts] | None:
    """Counts per role over all trials; None if a trial has none or there are no counts at all."""
    total: dict[str, ImageCounts] = {}
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

"""Converts the engine's iteration stats, which have TensorRT-LLM's keys, to samples of metric families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtx.engine.served_family import ServedFamily

Samples = Sequence[tuple[tuple[str, ...], float | None]]
"""The values of a family's labels, and the value; None: unknown."""


def by_rank(rows: Mapping[int, Mapping[str, Any]]) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The last row of each attention-DP rank, with the rank's label, which is omitted if there is only one rank."""
    ranks = sorted(rows.items())
    return [((str(rank),) if len(ranks) > 1 else (), row) for rank, row in ranks]


def value_at(row: Mapping[str, Any], path: str) -> float | None:
    """The value at ``path``, such as ``kvCacheStats.usedNumBlocks``; None if the row lacks it."""
    section, _, name = path.rpartition(".")
    value: float | None = ((row.get(section) or {}) if section else row).get(name)
    return value


def known_family(family: ServedFamily, samples: Samples, scale: float = 1) -> Iterator[Any]:
    """The family with the samples that have a value; nothing if none has."""
    known = [(labels, value * scale) for labels, value in samples if value is not None]
    if known:
        yield family.family(known)


class StepNumbers:
    """The number of each rank's last step, to recognise rows that repeat a step.

    The torch engine emits its last row again if the use of KV blocks has changed since. Sums over steps skip such rows.
    """

    def __init__(self) -> None:
        self._last: dict[int, float] = {}  # by attention-DP rank

    def is_new(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` belongs to a new step; False for a row without a step number."""
        rank, number = row.get("attentionDpRank") or 0, row.get("iter")
        if number is None or self._last.get(rank) == number:
            return False
        self._last[rank] = number
        return True

"""Counts how often prompts need each block content; the host tier evicts by these counts."""

from __future__ import annotations

from collections.abc import Iterable


class AskedNames:
    """Counts requests by content name. Above ``most`` names, it halves all counts and drops the names that reach 0."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[bytes, int] = {}

    def __getitem__(self, name: bytes) -> int:
        return self._counts.get(name, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, names: Iterable[bytes]) -> None:
        counts = self._counts
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        while len(counts) > self._most:
            self._counts = counts = {name: count // 2 for name, count in counts.items() if count > 1}

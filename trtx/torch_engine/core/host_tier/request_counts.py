"""How often contents were asked for lately."""

from __future__ import annotations

from collections.abc import Iterable


class AskedNames:
    """Counts requests for contents. Its memory is bounded: at ``most`` names, all counts are halved."""

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

    def lower(self, name: bytes) -> None:
        if self._counts.get(name):
            self._counts[name] -= 1

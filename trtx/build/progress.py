"""The progress of a build, as the child process reports it and the command shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "starting", "loading", "calibrating", "building", "exporting", "proving"]


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """``done`` of ``total`` steps of a phase. A ``total`` of 0 means that the number of steps is unknown."""

    phase: Phase
    done: int = 0
    total: int = 0


Listener = Callable[[BuildProgress], None]
Tell = Callable[[Phase, int, int], None]  # (phase, done, total): reports progress from within the child


class Clock:
    """Forwards progress, and sums the time that each phase took."""

    def __init__(self, on_progress: Listener) -> None:
        self._on_progress = on_progress
        self._totals: dict[str, float] = {}
        self._phase: str | None = None
        self._since = time.monotonic()

    def __call__(self, progress: BuildProgress) -> None:
        if progress.phase != self._phase:
            self._close()
            self._phase = progress.phase
        self._on_progress(progress)

    @property
    def seconds(self) -> dict[str, float]:
        self._close()
        return {phase: round(total, 2) for phase, total in self._totals.items()}

    def _close(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._totals[self._phase] = self._totals.get(self._phase, 0.0) + now - self._since
        self._since = now

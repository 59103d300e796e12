"""Decides when a dead process is started again, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass, field

BACK_OFF_S = (1.0, 2.0, 4.0, 8.0)
CRASH_LOOP_DEATHS = 5
CRASH_LOOP_WINDOW_S = 60.0


@dataclass(slots=True, eq=False)
class RestartPolicy:
    """The deaths of one process, on a monotonic clock.

    A crash loop is ``CRASH_LOOP_DEATHS`` deaths within ``CRASH_LOOP_WINDOW_S``, or as many consecutive deaths without
    serving in between: an engine that takes a minute to run out of memory would never meet the first condition.
    """

    _deaths: list[float] = field(default_factory=list)
    _unserved: int = 0

    def record_death(self, now: float, *, had_served: bool) -> float | None:
        """Seconds to wait before the next start; None for a crash loop."""
        self._deaths = [at for at in self._deaths if now - at < CRASH_LOOP_WINDOW_S] + [now]
        self._unserved = 0 if had_served else self._unserved + 1
        worst = max(len(self._deaths), self._unserved)
        return None if worst >= CRASH_LOOP_DEATHS else BACK_OFF_S[worst - 1]

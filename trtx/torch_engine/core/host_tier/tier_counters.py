"""What the host tier has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Totals since the engine started, in blocks unless the name says otherwise."""

    stored: int = 0
    loaded: int = 0
    hits: int = 0  # of prompts, found in host memory only
    missed: int = 0  # of prompts, in neither tier
    evicted: int = 0  # from host memory
    dropped: int = 0  # evicted from the device without a copy: of too low a priority, or too many at once
    abandoned_loads: int = 0  # given up after :data:`.tier.LOAD_TIMEOUT_S`, or the content was withdrawn
    stored_seconds: float = 0.0
    loaded_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        looked_up = self.hits + self.missed
        return self.hits / looked_up if looked_up else 0.0

"""What a decode worker says of one request's handoff: the one form of it, for who answers and who asks.

It rides in ``engine_data`` of an answer, under :data:`KEY`, where a client asks for that (``nvext.extra_fields``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trtx.engine.api import Transfer

KEY = "handoff"

Outcome = Literal["read", "nothing", "recomputed", "whole", "unknown"]
"""``read``: KV came. ``nothing``: none had to, as the own prefix cache had the prompt. ``recomputed``: none came that
had to, so the prompt was computed a second time. ``whole``: no prefill worker had the request. ``unknown``: the engine
does not say."""
OUTCOMES: tuple[Outcome, ...] = ("read", "nothing", "recomputed", "unknown")
"""Of a request that came with a prefill worker's answer."""


@dataclass(frozen=True, slots=True)
class HandoffFacts:
    """``prefill`` and ``decode``: names of workers within their topology. ``prefill`` None: it did not say its name,
    or there was none."""

    decode: str
    outcome: Outcome
    prefill: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    because: str = ""  # of recomputed: why no KV came

    def to_engine_data(self) -> dict[str, Any]:
        """As Dynamo takes it: plain values under our own key."""
        return {KEY: msgspec.to_builtins(self)}

    @classmethod
    def of_engine_data(cls, engine_data: Any) -> HandoffFacts | None:
        """None where no worker of this trtx said anything of a handoff."""
        if not isinstance(engine_data, Mapping) or KEY not in engine_data:
            return None
        try:
            return msgspec.convert(engine_data[KEY], cls)
        except msgspec.ValidationError:
            return None


def outcome_of(transfer: Transfer | None) -> Outcome:
    """Of a request that came with a prefill worker's answer, by what its engine says of it."""
    if transfer is None:
        return "unknown"
    if transfer.recomputed_because:
        return "recomputed"
    return "read" if transfer.seconds > 0 else "nothing"

"""What a decode worker reports about one request's handoff; the format for both the worker and the client.

It is sent in ``engine_data`` of an answer, under :data:`KEY`, if the client requests it (``nvext.extra_fields``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from trtx.engine.api import Transfer

KEY = "handoff"

Outcome = Literal["read", "nothing", "recomputed", "local", "whole", "unknown"]
"""What happened to a request's KV.

- ``read``: the KV arrived from a prefill worker.
- ``nothing``: no KV was needed, because the decode worker's prefix cache had the prompt.
- ``recomputed``: the KV did not arrive, so the prompt was computed a second time.
- ``local``: the router left the prompt to the decode worker (``--conditional-disagg``).
- ``whole``: no prefill worker had the request, though one should have had it.
- ``unknown``: the engine does not report it.
"""
OUTCOMES: tuple[Outcome, ...] = ("read", "nothing", "recomputed", "unknown")
"""Possible outcomes of a request that arrived with a prefill worker's answer."""


@dataclass(frozen=True, slots=True)
class HandoffFacts:
    """The handoff of one request.

    ``prefill`` and ``decode`` are worker names within their topology. ``prefill`` is None if the prefill worker did not
    give its name, or if there was none.
    """

    decode: str
    outcome: Outcome
    prefill: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    because: str = ""  # for recomputed: why no KV arrived

    def to_engine_data(self) -> dict[str, Any]:
        """The facts as plain values under trtx's own key, in the form that Dynamo accepts."""
        return {KEY: msgspec.to_builtins(self)}

    @classmethod
    def of_engine_data(cls, engine_data: Any) -> HandoffFacts | None:
        """Parses ``engine_data``. None if no worker of this trtx release reported a handoff in it."""
        if not isinstance(engine_data, Mapping) or KEY not in engine_data:
            return None
        try:
            return msgspec.convert(engine_data[KEY], HandoffFacts)
        except msgspec.ValidationError:
            return None


def outcome_of(transfer: Transfer | None) -> Outcome:
    """Outcome of a request that arrived with a prefill worker's answer, from the engine's transfer report."""
    if transfer is None:
        return "unknown"
    if transfer.recomputed_because:
        return "recomputed"
    return "read" if transfer.seconds > 0 else "nothing"


# The first use of this type happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(HandoffFacts)

"""The ranges that Dynamo's frontend accepts for the request-body fields that a user may set with a load.

Observed with Dynamo 1.6.1; ``tests/integration/test_frontends.py`` sends each range to its frontend. The frontend
answers HTTP 400 to any other value, so every request of a load would fail. docs/request-fields.md describes how the
other body fields are handled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.config.wording import quoted
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class BodyRange:
    low: float
    high: float
    is_whole: bool = False  # only integers
    is_open: bool = False  # the lower bound is excluded

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        if self.high >= 2**31 - 1:  # the wire type's limit, which isn't worth showing
            return f"{kind} from {self.low:g} on" if self.low > -(2**31) else f"{kind} of 64 bits"
        return (
            f"{kind} {'above' if self.is_open else 'from'} {self.low:g} {'up ' if self.is_open else ''}to {self.high:g}"
        )


RANGES: Mapping[str, BodyRange] = {
    "temperature": BodyRange(0, 2),
    "top_p": BodyRange(0, 1, is_open=True),
    "top_k": BodyRange(-1, 2**31 - 1, is_whole=True),
    "min_p": BodyRange(0, 1),
    "frequency_penalty": BodyRange(-2, 2),
    "presence_penalty": BodyRange(-2, 2),
    "repetition_penalty": BodyRange(0, 2, is_open=True),
    "seed": BodyRange(-(2**63), 2**63 - 1, is_whole=True),
}


def check_body(fields: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that the frontend refuses. Null counts as unset."""
    for name, value in fields.items():
        if name in RANGES and value is not None and not RANGES[name].holds(value):
            raise UsageError(
                f"{name} is {quoted(value)}, but Dynamo's frontend accepts only {RANGES[name]} and would refuse every "
                "request; change it"
            )

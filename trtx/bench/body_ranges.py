"""The values that Dynamo's frontend takes in a request's body, for what a person may set with a load.

Seen with 1.4.2, of whose frontend ``tests/integration/test_body_ranges.py`` asks each: it answers HTTP 400 to all
others, and so to every request of a load. Of what else a body may hold, docs/request-fields.md says what becomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.config.wording import quoted
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float
    is_whole: bool = False  # integers alone
    is_open: bool = False  # its lower end is none of it

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        if self.high >= 2**31 - 1:  # of the wire's type, which nobody looks for
            return f"{kind} from {self.low:g} on" if self.low > -(2**31) else f"{kind} of 64 bits"
        return (
            f"{kind} {'above' if self.is_open else 'from'} {self.low:g} {'up ' if self.is_open else ''}to {self.high:g}"
        )


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, 2**31 - 1, is_whole=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, is_open=True),
    "seed": Range(-(2**63), 2**63 - 1, is_whole=True),
}


def check_body(fields: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that the frontend refuses; null is none."""
    for name, value in fields.items():
        if name in RANGES and value is not None and not RANGES[name].holds(value):
            raise UsageError(
                f"{name} is {quoted(value)}, and Dynamo's frontend, which would refuse every request, takes "
                f"{RANGES[name]}; change it"
            )

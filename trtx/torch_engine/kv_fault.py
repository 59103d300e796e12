"""Fault injection for tests: corrupt KV in some handoffs, to prove that the answer checks detect it.

``TRTX_FAULT=swap-block:every=100,layer=0``: in every 100th handoff that a decode engine reads, one block of one layer
holds another request's KV. Only ``trtx eval parity`` serves with this variable set, and every form of its report says
so. Every other command refuses to start while it is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtx.config.planted_fault import VARIABLE as VARIABLE
from trtx.errors import UsageError

_EXPECTED = "expected a value such as swap-block:every=100,layer=0, with every at least 1 and layer at least 0"
_FORM = re.compile(r"swap-block:every=([0-9]{1,9}),layer=([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class KvFault:
    """In each ``every``-th handoff, one block of ``layer`` (from 0) holds another request's KV."""

    every: int
    layer: int

    def __str__(self) -> str:
        return f"swap-block:every={self.every},layer={self.layer}"


def parse_kv_fault(text: str) -> KvFault:
    """Parses the value of :data:`VARIABLE`. Raises UsageError for any other form."""
    found = _FORM.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise UsageError(f"{VARIABLE} is {text[:80]!r}; {_EXPECTED}")
    return KvFault(int(found[1]), int(found[2]))

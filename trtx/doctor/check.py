"""The result of one check, which is one row of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# absent: the item is missing, and serving does not need it. warning: serving works, but is slower or at risk.
CheckStatus = Literal["ok", "absent", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. ``fix`` is set whenever the status is warning or failed."""

    name: str
    status: CheckStatus
    seen: str
    expected: str = ""
    fix: str = ""


def ok(name: str, seen: str, expected: str = "") -> Check:
    return Check(name, "ok", seen, expected)


def absent(name: str, seen: str) -> Check:
    return Check(name, "absent", seen)


def warning(name: str, seen: str, expected: str, fix: str) -> Check:
    return Check(name, "warning", seen, expected, fix)


def failed(name: str, seen: str, expected: str, fix: str) -> Check:
    return Check(name, "failed", seen, expected, fix)

"""The record type of a validity check. A cell's reasons and docs/reference/checks.md come from these records.

The records themselves are in ``record_checks.py`` and ``server_checks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from trtx.bench.judge.evidence import Evidence

# Share of a request's time that the client adds. The client's time doesn't grow when the server becomes slower, so the
# measured slow-down is too small by this share.
CLIENT_SUSPECT, CLIENT_INVALID = 0.10, 0.25


class ValidityLevel(Enum):
    VALID = "VALID"
    SUSPECT = "SUSPECT"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Found:
    """A rule's result if it found a reason to doubt the cell."""

    level: ValidityLevel
    sentence: str  # short, with the numbers, without a full stop


@dataclass(frozen=True, slots=True)
class NotObserved:
    """A rule's result if evidence is missing or insufficient."""

    why: str


# None: the rule was checked and found no reason to doubt the cell.
Rule = Callable[[Evidence], Found | NotObserved | None]


@dataclass(frozen=True, slots=True)
class ValidityCheck:
    """One reason why a cell can be SUSPECT or INVALID. Its texts appear in docs/reference/checks.md."""

    name: str
    rule: Rule
    suspect: str  # the threshold in words; empty: never
    invalid: str
    why: str


_checks: dict[str, ValidityCheck] = {}


def check(*, name: str, why: str, suspect: str = "", invalid: str = "") -> Callable[[Rule], Rule]:
    """Decorates a rule: registers it as a check."""

    def taken_in(rule: Rule) -> Rule:
        if name in _checks:
            raise ValueError(f"two checks are called {name}; give each a name of its own")
        _checks[name] = ValidityCheck(name, rule, suspect, invalid, why)
        return rule

    return taken_in


def all_checks() -> tuple[ValidityCheck, ...]:
    """All checks: those of ``record_checks.py``, then those of ``server_checks.py``."""
    return tuple(_checks.values())


def client_share(share: float, sentence: str) -> Found | None:
    """The result for a load generator that takes ``share`` of the measured time."""
    if share <= CLIENT_SUSPECT:
        return None
    return Found(ValidityLevel.INVALID if share > CLIENT_INVALID else ValidityLevel.SUSPECT, sentence)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"

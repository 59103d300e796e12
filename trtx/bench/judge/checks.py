"""What a check of a cell is: one record around its rule, from which its reason and its row in docs/validity.md follow.

The records themselves stand in ``record_checks.py`` and ``server_checks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from trtx.bench.judge.evidence import Evidence

# Of a request's time: what the client adds to it is no server's, so a slow-down by 10 % is understated by this share.
CLIENT_SUSPECT, CLIENT_INVALID = 0.10, 0.25


class Level(Enum):
    VALID = "VALID"
    SUSPECT = "SUSPECT"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule says where something speaks against the cell."""

    level: Level
    sentence: str  # short, with its figures, without its full stop


@dataclass(frozen=True, slots=True)
class NotObserved:
    """What a rule says where the evidence is missing, or too little for an answer."""

    why: str


# None: it was looked at, and nothing speaks against the cell.
Rule = Callable[[Evidence], Found | NotObserved | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One reason for which a cell can be SUSPECT or INVALID. The texts are those of docs/validity.md."""

    name: str
    rule: Rule
    suspect: str  # from where on; empty: never
    invalid: str
    why: str


_checks: dict[str, Check] = {}


def check(*, name: str, why: str, suspect: str = "", invalid: str = "") -> Callable[[Rule], Rule]:
    """Makes the record of the rule that it decorates."""

    def taken_in(rule: Rule) -> Rule:
        if name in _checks:
            raise ValueError(f"two checks are called {name}; give each a name of its own")
        _checks[name] = Check(name, rule, suspect, invalid, why)
        return rule

    return taken_in


def all_checks() -> tuple[Check, ...]:
    """Every record, as ``record_checks.py`` and then ``server_checks.py`` have them."""
    return tuple(_checks.values())


def client_share(share: float, sentence: str) -> Found | None:
    """What follows where a load generator takes this share of the time that is measured."""
    if share <= CLIENT_SUSPECT:
        return None
    return Found(Level.INVALID if share > CLIENT_INVALID else Level.SUSPECT, sentence)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"

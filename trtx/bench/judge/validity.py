"""Whether a cell's figures can be trusted: VALID, SUSPECT or INVALID, what speaks against it and what nobody checked.

INVALID: the figures answer another question than was asked, as another load or another system was measured; more
requests would not mend that. SUSPECT: it was what was asked, but something disturbed it, or it is too little to
conclude from. docs/validity.md has a row for each check. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Importing them makes the records of all checks.
from trtx.bench.judge import record_checks, server_checks  # noqa: F401
from trtx.bench.judge.checks import Found, Level, NotObserved, all_checks
from trtx.bench.judge.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Reason:
    """What speaks against a cell."""

    name: str  # of the check
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A check that could not be made, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"not checked: {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class Validity:
    """The verdict: the worst of its reasons. VALID: what was checked is in order; show ``unchecked`` beside it."""

    level: Level
    reasons: tuple[Reason, ...]  # worst first
    unchecked: tuple[Unchecked, ...]


def judge(evidence: Evidence) -> Validity:
    """The verdict on one cell. Each check gives a reason, says why it could not be made, or has nothing to say."""
    reasons, unchecked = [], []
    for made in all_checks():
        match made.rule(evidence):
            case Found(level, sentence):
                reasons.append(Reason(made.name, level, sentence))
            case NotObserved(why):
                unchecked.append(Unchecked(made.name, why))
    reasons.sort(key=lambda reason: reason.level is not Level.INVALID)
    return Validity(reasons[0].level if reasons else Level.VALID, tuple(reasons), tuple(unchecked))

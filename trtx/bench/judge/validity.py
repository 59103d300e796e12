"""Whether a cell's metrics can be trusted: VALID, SUSPECT or INVALID, with the reasons and the checks that were
impossible.

INVALID: the metrics answer a different question, because another load or another system was measured; more requests
would not help. SUSPECT: the right thing was measured, but something disturbed it or there is too little data for a
conclusion. docs/validity.md lists all checks. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# These imports register all checks.
from trtx.bench.judge import record_checks, server_checks  # noqa: F401
from trtx.bench.judge.checks import Found, NotObserved, ValidityLevel, all_checks
from trtx.bench.judge.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason against a cell."""

    name: str  # name of the check
    level: ValidityLevel
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
    """The verdict: the worst of its reasons. VALID covers only what was checked, so show ``unchecked`` with it."""

    level: ValidityLevel
    reasons: tuple[Reason, ...]  # worst first
    unchecked: tuple[Unchecked, ...]


def judge(evidence: Evidence) -> Validity:
    """The verdict on one cell. Each check returns a reason, an explanation why it could not be made, or None."""
    reasons, unchecked = [], []
    for made in all_checks():
        match made.rule(evidence):
            case Found(level, sentence):
                reasons.append(Reason(made.name, level, sentence))
            case NotObserved(why):
                unchecked.append(Unchecked(made.name, why))
    reasons.sort(key=lambda reason: reason.level is not ValidityLevel.INVALID)
    return Validity(reasons[0].level if reasons else ValidityLevel.VALID, tuple(reasons), tuple(unchecked))

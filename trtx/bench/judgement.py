"""What is said of one criterion in one cell, and what all of it says of a run.

Bad news outweighs no news, and no news outweighs good news: what was found missed stays missed, whatever else could not
be judged, and a run passes only if each of its judgements does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtx.bench.intervals import Interval
from trtx.errors import GateError, NoVerdictError, TrtxError

_TOLD = 3  # judgements in one sentence; the report has all


class Verdict(Enum):
    """In the order in which they count: the first that any judgement has is the run's."""

    FAILED = "failed"  # what should be judged is not there, or requests failed
    MISSED = "missed"  # an objective
    REGRESSED = "regressed"  # worse than the baseline by more than the limit, beyond chance
    NO_VERDICT = "no verdict"  # measured too little, or not soundly enough, to say
    PASS = "pass"


BAD = (Verdict.FAILED, Verdict.MISSED, Verdict.REGRESSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of one criterion in one cell."""

    cell: str
    criterion: str  # 'time_to_first_token:p99:le:500', or the metric that was compared
    verdict: Verdict
    reason: str  # with the numbers; what was expected and, where it helps, what to do
    is_suspect: bool = False  # of a cell that is SUSPECT, on either side
    # An objective: the value, and its interval over trials. A comparison: candidate / baseline.
    value: float | None = None
    interval: Interval | None = None
    limit: float | None = None  # that the value, or the ratio's interval, is held against
    unit: str = ""
    is_near: bool = False  # an objective's limit lies within the interval: another run may answer otherwise


def outcome(judgements: Sequence[Judgement]) -> TrtxError | None:
    """None where every judgement passed: GateError (exit 1) for bad news, else NoVerdictError (3), also for none."""
    if not judgements:
        return NoVerdictError("nothing was judged: no cell, or no metric; expected at least one of each")
    for verdicts, error in ((BAD, GateError), ((Verdict.NO_VERDICT,), NoVerdictError)):
        found = [judgement for verdict in verdicts for judgement in judgements if judgement.verdict is verdict]
        if found:
            told = "; ".join(f"{one.cell} {one.criterion} {one.verdict.value}: {one.reason}" for one in found[:_TOLD])
            more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
            return error(f"{len(found)} of {len(judgements)} judgements did not pass: {told}{more}")
    return None

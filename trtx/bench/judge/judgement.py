"""What is said of one criterion in one cell, and what all of it says of a run.

Bad news outweighs no news, and no news outweighs good news: what was found missed stays missed, whatever else could not
be judged, and a run passes only if each of its judgements does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtx.bench.judge.checks import Level
from trtx.bench.judge.sample import Sample
from trtx.errors import GateError, NoVerdictError, TrtxError
from trtx.stats.intervals import Interval

_TOLD = 3  # reasons in one sentence; the report has all
_NAMED = 6  # cells of one of them


class Verdict(Enum):
    """In the order in which they count: the first that any judgement has is the run's."""

    FAILED = "failed"  # what should be judged is not there, or requests failed
    MISSED = "missed"  # a bound
    REGRESSED = "regressed"  # worse than the baseline by more than the limit, beyond chance
    NO_VERDICT = "no verdict"  # measured too little, or not soundly enough, to say
    PASS = "pass"


_BAD = (Verdict.FAILED, Verdict.MISSED, Verdict.REGRESSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of one criterion in one cell. ``value``: the figure that a bound is held against, or candidate / baseline."""

    cell: str
    criterion: str  # 'time_to_first_token:p99:le:500', or the metric that was compared
    verdict: Verdict
    reason: str  # with the numbers; what was expected and, where it helps, what to do
    doubts: tuple[str, ...] = ()  # why the cell, on either side, is SUSPECT; it is judged all the same
    value: float | None = None
    interval: Interval | None = None  # of it, over trials; None: there is none, of one trial
    limit: float | None = None
    unit: str = ""
    is_near: bool = False  # a bound lies within the interval: another run may be judged otherwise


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no number to judge by, and what follows from that."""

    verdict: Verdict
    reason: str

    def of(self, sample: Sample, criterion: str, marks: tuple[str, ...]) -> Judgement:
        return Judgement(cell=sample.cell, criterion=criterion, verdict=self.verdict, reason=self.reason, doubts=marks)


def why_not_judged(sample: Sample) -> Refusal | None:
    """Of a cell that has no result, is INVALID, or lacks the part that is asked for; None where it can be judged."""
    if sample.figures is None:
        why = sample.failure or "it was not measured"
        return Refusal(Verdict.FAILED, f"the cell has no result ({why}); see its logs")
    if missing := sample.missing_trials():
        numbers = ", ".join(map(str, missing))
        return Refusal(Verdict.FAILED, f"trial {numbers} of {len(sample.trials)} has no result; measure the cell again")
    if sample.validity is Level.INVALID:
        why = "; ".join(sample.doubts) or "for no stated reason"
        return Refusal(Verdict.NO_VERDICT, f"the cell is INVALID: {why}")
    if sample.window == "steady" and (unsteady := sample.trials_without_steady()):
        numbers = ", ".join(map(str, unsteady))
        return Refusal(
            Verdict.NO_VERDICT,
            f"trial {numbers} of {len(sample.trials)} has no steady part; measure longer, or judge whole trials",
        )
    return None


def doubts(sample: Sample, side: str = "") -> tuple[str, ...]:
    """Of a SUSPECT cell: why, or that it is, where nothing says why."""
    if sample.validity is not Level.SUSPECT:
        return ()
    return tuple(f"{side}{doubt}" for doubt in sample.doubts or ("the cell is SUSPECT",))


def outcome(judgements: Sequence[Judgement]) -> TrtxError | None:
    """None where every judgement passed: GateError (exit 1) for bad news, else NoVerdictError (3), also for none."""
    if not judgements:
        return NoVerdictError("nothing was judged: no cell, or no metric; expected at least one of each")
    found = [one for verdict in Verdict for one in judgements if one.verdict is verdict is not Verdict.PASS]
    if not found:
        return None
    groups: dict[tuple[Verdict, str], list[Judgement]] = {}  # those that did not pass for one reason
    for one in found:
        groups.setdefault((one.verdict, one.reason), []).append(one)
    shown = [*groups.items()][:_TOLD]
    told = "; ".join(f"{_names(alike)} {verdict.value}: {reason}" for (verdict, reason), alike in shown)
    left = len(found) - sum(len(alike) for _, alike in shown)
    error = GateError if found[0].verdict in _BAD else NoVerdictError
    more = f"; and {left} more" if left else ""
    return error(f"{len(found)} of {len(judgements)} judgements did not pass: {told}{more}")


def _names(alike: Sequence[Judgement]) -> str:
    """``agg-c1, agg-c2 request_latency:p50:le:5``: a criterion once with its cells, those of the same cells as one."""
    cells: dict[str, list[str]] = {}
    for one in alike:
        cells.setdefault(one.criterion, []).append(one.cell)
    criteria: dict[tuple[str, ...], list[str]] = {}
    for criterion, of in cells.items():
        criteria.setdefault(tuple(of), []).append(criterion)
    return " and ".join(f"{_few(of)} {', '.join(alike_too)}" for of, alike_too in criteria.items())


def _few(cells: Sequence[str]) -> str:
    return ", ".join(cells[:_NAMED]) + (f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else "")

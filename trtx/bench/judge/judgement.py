"""The result for one criterion in one cell, and the outcome of a run that follows from all results.

Failures take precedence over missing verdicts, and those over passes: an objective that was missed stays missed even if
others could not be judged, and a run passes only if every judgement passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.sample import CellSample
from trtx.errors import GateError, NoVerdictError, TrtxError
from trtx.stats.intervals import Interval

_MOST_REASONS = 3  # maximum number of reasons in one sentence; the report has all
_NAMED = 6  # maximum number of cells named per reason


class Verdict(Enum):
    """Verdicts by precedence: the first one that any judgement has is the run's verdict."""

    FAILED = "failed"  # the values to judge are missing, or requests failed
    MISSED = "missed"  # a bound was missed
    REGRESSED = "regressed"  # worse than the baseline by more than the limit, beyond chance
    NO_VERDICT = "no verdict"  # not enough valid measurements for a verdict
    PASS = "pass"


_BAD = (Verdict.FAILED, Verdict.MISSED, Verdict.REGRESSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The verdict for one criterion in one cell. ``value`` is the metric compared with a bound, or candidate /
    baseline.
    """

    cell: str
    criterion: str  # 'time_to_first_token:p99:le:500', or the metric that was compared
    verdict: Verdict
    reason: str  # with the numbers, the expected value, and what to do if that helps
    doubts: tuple[str, ...] = ()  # why a cell on either side is SUSPECT; it is judged all the same
    value: float | None = None
    interval: Interval | None = None  # confidence interval of value over trials; None for a single trial
    limit: float | None = None
    unit: str = ""
    is_near: bool = False  # the bound lies within the interval, so another run may get a different verdict


@dataclass(frozen=True, slots=True)
class UnjudgedValue:
    """The reason why a value can't be judged, and the verdict that follows."""

    verdict: Verdict
    reason: str

    def of(self, sample: CellSample, criterion: str, marks: tuple[str, ...]) -> CheckResult:
        return CheckResult(
            cell=sample.cell, criterion=criterion, verdict=self.verdict, reason=self.reason, doubts=marks
        )


def why_not_judged(sample: CellSample) -> UnjudgedValue | None:
    """Refuses a cell that has no result, is INVALID, or lacks the requested part; None if the cell can be judged."""
    if sample.figures is None:
        why = sample.failure or "it was not measured"
        return UnjudgedValue(Verdict.FAILED, f"the cell has no result ({why}); see its logs")
    if missing := sample.missing_trials():
        numbers = ", ".join(map(str, missing))
        return UnjudgedValue(
            Verdict.FAILED, f"trial {numbers} of {len(sample.trials)} has no result; measure the cell again"
        )
    if sample.validity is ValidityLevel.INVALID:
        why = "; ".join(sample.doubts) or "for no stated reason"
        return UnjudgedValue(Verdict.NO_VERDICT, f"the cell is INVALID: {why}")
    if sample.window == "steady" and (unsteady := sample.trials_without_steady()):
        numbers = ", ".join(map(str, unsteady))
        return UnjudgedValue(
            Verdict.NO_VERDICT,
            f"trial {numbers} of {len(sample.trials)} has no steady part; measure longer, or judge whole trials",
        )
    return None


def doubts(sample: CellSample, side: str = "") -> tuple[str, ...]:
    """The reasons why a cell is SUSPECT, or a general one if none is stated; empty for other cells."""
    if sample.validity is not ValidityLevel.SUSPECT:
        return ()
    return tuple(f"{side}{doubt}" for doubt in sample.doubts or ("the cell is SUSPECT",))


def outcome(judgements: Sequence[CheckResult]) -> TrtxError | None:
    """The error with which the run ends; None if every check passed.

    GateError (exit code 1) if a check failed. Otherwise NoVerdictError (exit code 3): a check had no verdict, or there
    were no checks.
    """
    if not judgements:
        return NoVerdictError(
            "nothing was judged, because there is no cell or no metric; expected at least one of each"
        )
    found = [one for verdict in Verdict for one in judgements if one.verdict is verdict is not Verdict.PASS]
    if not found:
        return None
    groups: dict[tuple[Verdict, str], list[CheckResult]] = {}  # judgements that did not pass, grouped by reason
    for one in found:
        groups.setdefault((one.verdict, one.reason), []).append(one)
    shown = [*groups.items()][:_MOST_REASONS]
    reasons = "; ".join(f"{_names(alike)} {verdict.value}: {reason}" for (verdict, reason), alike in shown)
    left = len(found) - sum(len(alike) for _, alike in shown)
    error = GateError if found[0].verdict in _BAD else NoVerdictError
    more = f"; and {left} more" if left else ""
    return error(f"{len(found)} of {len(judgements)} checks did not pass: {reasons}{more}")


def _names(alike: Sequence[CheckResult]) -> str:
    """Names such as ``agg-c1, agg-c2 request_latency:p50:le:5``: cells with equal criteria are grouped."""
    cells: dict[str, list[str]] = {}
    for one in alike:
        cells.setdefault(one.criterion, []).append(one.cell)
    criteria: dict[tuple[str, ...], list[str]] = {}
    for criterion, of in cells.items():
        criteria.setdefault(tuple(of), []).append(criterion)
    return " and ".join(f"{_few(of)} {', '.join(alike_too)}" for of, alike_too in criteria.items())


def _few(cells: Sequence[str]) -> str:
    return ", ".join(cells[:_NAMED]) + (f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else "")

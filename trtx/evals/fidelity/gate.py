"""Verdicts on fidelity: a maximum divergence and a minimum agreement, each judged three-way by its confidence
interval.
"""

from __future__ import annotations

from collections.abc import Iterator

from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.config.wording import counted
from trtx.evals.fidelity.forms import MeanOverPositions, TopologyFidelity
from trtx.evals.statistics import FEWEST_SAMPLES
from trtx.stats.intervals import Interval

LEAST_SHARED = 0.5
"""Minimum share of the reference's probability that must be compared token by token for a small divergence to pass.

The reported divergence is a lower bound, which says little if most probability is in tokens that neither side reports.
"""
_ASK_AGAIN = "ask for them again with --resume"


def judge_fidelity(
    found: TopologyFidelity, max_kl: float | None = None, min_agreement: float | None = None
) -> Iterator[CheckResult]:
    """Judges one topology: whether every sequence was compared, and each requested bound."""
    missing = found.sequences - found.answered
    whole = CheckResult(
        cell=found.topology, criterion="unanswered_sequence_count:avg:le:0", verdict=Verdict.PASS,
        reason="every sequence was compared", value=missing, limit=0, unit="sequences",
    )  # fmt: skip
    if found.note is not None:
        yield _judgement(whole.cell, whole.criterion, Verdict.NO_VERDICT, found.note)
    elif missing:
        told = "; ".join(map(str, found.unanswered[:3]))
        reason = f"{missing} of {counted(found.sequences, 'sequence')} without an answer: {told}; {_ASK_AGAIN}"
        yield CheckResult(
            cell=whole.cell, criterion=whole.criterion, verdict=Verdict.FAILED, value=missing, limit=0,
            unit="sequences", reason=reason,
        )  # fmt: skip
    else:
        yield whole
    if found.others is not None and found.others.are_several:
        yield _judgement(found.topology, "named_models", Verdict.NO_VERDICT, found.others.sentence)
    if max_kl is not None:
        yield _judge_kl(found, max_kl)
    if min_agreement is not None:
        yield _judge_agreement(found, min_agreement)


def _judge_kl(found: TopologyFidelity, limit: float) -> CheckResult:
    criterion = f"kl_divergence:mean:le:{limit:.10g}"
    part = found.part("text")
    if part is None or part.kl.interval is None:
        return _judgement(found.topology, criterion, Verdict.NO_VERDICT, _no_figure(found))
    kl, shared = part.kl.interval, f"{100 * part.shared:.3g} % of the reference's probability"
    told = f"at least {_range(kl)} nats a token, over the tokens that hold {shared}"
    if kl.low > limit:
        return _judged(found, criterion, Verdict.MISSED, f"{told}; expected at most {limit:g}", part.kl, limit, "nats")
    if kl.high > limit:
        why = f"{told}, and the bound {limit:g} lies within the interval; ask more prompts"
        return _judged(found, criterion, Verdict.NO_VERDICT, why, part.kl, limit, "nats")
    if part.shared < LEAST_SHARED:
        why = (
            f"{told}; the rest is unknown, so at least {100 * LEAST_SHARED:g} % are needed to call the divergence small"
        )
        return _judged(found, criterion, Verdict.NO_VERDICT, why, part.kl, limit, "nats")
    return _incomplete(
        found, _judged(found, criterion, Verdict.PASS, f"{told}, at most {limit:g}", part.kl, limit, "nats")
    )


def _judge_agreement(found: TopologyFidelity, limit: float) -> CheckResult:
    criterion = f"top1_agreement:share:ge:{limit:.10g}"
    part = found.part("text")
    if part is None or part.agreement.interval is None:
        return _judgement(found.topology, criterion, Verdict.NO_VERDICT, _no_figure(found))
    share = part.agreement.interval
    told = f"{_range(share)} of the tokens"
    if share.high < limit:
        return _judged(found, criterion, Verdict.MISSED, f"{told}; expected at least {limit:g}", part.agreement, limit)
    if share.low < limit:
        why = f"{told}, and the bound {limit:g} lies within the interval; ask more prompts"
        return _judged(found, criterion, Verdict.NO_VERDICT, why, part.agreement, limit)
    return _incomplete(
        found, _judged(found, criterion, Verdict.PASS, f"{told}, at least {limit:g}", part.agreement, limit)
    )


def _incomplete(found: TopologyFidelity, passed: CheckResult) -> CheckResult:
    """Turns a pass into NO_VERDICT if sequences are missing."""
    if found.answered == found.sequences:
        return passed
    lost = found.sequences - found.answered
    return _judgement(
        passed.cell, passed.criterion, Verdict.NO_VERDICT,
        f"{passed.reason}, but {lost} of {counted(found.sequences, 'sequence')} without an answer; {_ASK_AGAIN}",
    )  # fmt: skip


def _no_figure(found: TopologyFidelity) -> str:
    return found.note or why_no_interval(found.answered)


def why_no_interval(sequences: int) -> str:
    """Returns why a metric over so many compared sequences has no interval."""
    if sequences < FEWEST_SAMPLES:
        return f"{counted(sequences, 'sequence')} compared, too few for an interval; ask 10 prompts or more"
    return f"all {sequences} sequences say the same, which does not show how far off others may be"


def _range(interval: Interval) -> str:
    return f"{interval.estimate:.4g} ({interval.low:.4g} to {interval.high:.4g})"


def _judged(
    found: TopologyFidelity,
    criterion: str,
    verdict: Verdict,
    reason: str,
    figure: MeanOverPositions,
    limit: float,
    unit: str = "",
) -> CheckResult:
    return CheckResult(
        cell=found.topology, criterion=criterion, verdict=verdict, reason=reason, value=figure.value,
        interval=figure.interval, limit=limit, unit=unit, is_near=verdict is Verdict.NO_VERDICT,
    )  # fmt: skip


def _judgement(cell: str, criterion: str, verdict: Verdict, reason: str) -> CheckResult:
    return CheckResult(cell=cell, criterion=criterion, verdict=verdict, reason=reason)

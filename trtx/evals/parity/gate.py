"""Judges the distances of a route by a yardstick: the distances of two identical runs of the reference.

A log-probability is a difference of values of the size of the model's logits, about 16 for a confident model. In
float32, the products of a row are also summed in float32. Summing n of them in a different order changes the result by
about √n ε / 2 of its size, which is 512 ε for n = 4096 and size 16. In half precision, sums are computed in float32 and
rounded once: 16 ε / 2 on either side. Twice the sum of both sides is permitted, because earlier layers round too: 32 ε.

These values are a floor for the permitted distance, for identical runs that differ less. Such runs may even be bitwise
equal, while a prompt cut into chunks is summed in a different order. Above the floor, the identical runs determine the
limit. The largest of thousands of noise distances is hardly ever twice that of another run, so 4 times is permitted.

This finds a few wrong log-probabilities. Many slightly wrong ones show in the mean, which may be up to 4 times that of
identical runs, or a quarter of the floor: the largest of thousands of normal deviates is 4 to 5 times their mean
absolute value.

A model served with ``--deterministic`` promises bitwise equality on every route, so no distance is permitted there.
"""

from __future__ import annotations

from collections.abc import Iterator

from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.evals.parity.forms import ComparedRoute, PassComparison, Tolerance

FACTOR = 4.0  # multiple of the identical runs' largest and mean distance that is permitted
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOOR = {"float32": 512 * EPSILON["float32"], "float16": 32 * EPSILON["float16"], "bfloat16": 32 * EPSILON["bfloat16"]}
MEAN_SHARE = 4  # divisor of the floor for the mean
PLAUSIBLE = 8  # multiple of the floor above which a difference of identical runs can't be rounding
_TOLD = 3  # maximum number of requests in one sentence
_DIVERGENCES = "unexplained_divergences:count:le:0"
_LARGEST, _MEAN = "logprob_distance:max:le:yardstick", "logprob_distance:mean:le:yardstick"


def tolerance_of(reference: PassComparison, dtype: str | None) -> Tolerance:
    """The tolerance from two runs of the reference. ``dtype``: the model's compute dtype; None: unknown."""
    floor = FLOOR.get(dtype or "")
    largest = reference.worst[0].distance if reference.worst else 0.0
    return Tolerance(
        dtype=dtype,
        floor=floor,
        largest=largest,
        mean=reference.mean_distance,
        most=max(FACTOR * largest, floor or 0.0),
        most_mean=max(FACTOR * reference.mean_distance, (floor or 0.0) / MEAN_SHARE),
    )


def no_tolerance(reference: PassComparison, dtype: str | None) -> Tolerance:
    """The tolerance for a reference that promises bitwise equality on every route."""
    largest = reference.worst[0].distance if reference.worst else 0.0
    return Tolerance(
        dtype=dtype, floor=0.0, largest=largest, mean=reference.mean_distance, most=0.0, most_mean=0.0
    )  # fmt: skip


def judge_reference(reference: ComparedRoute, tolerance: Tolerance | None) -> Iterator[CheckResult]:
    """Judges whether the reference is usable as a yardstick."""
    yield _answered(reference)
    yield from _named(reference)
    cell, what = reference.route, "yardstick"
    if tolerance is None:
        yield CheckResult(cell=cell, criterion=what, verdict=Verdict.NO_VERDICT, reason="no request was answered twice")
        return
    told = f"two identical runs differ by at most {tolerance.largest:.2g}, {tolerance.mean:.2g} on average"
    if tolerance.floor == 0.0 and (tolerance.largest > 0.0 or reference.compared.divergences):
        reason = f"{told}, and --deterministic promises the same bits"
        yield CheckResult(cell=cell, criterion=what, verdict=Verdict.MISSED, reason=reason)
        return
    if tolerance.floor is not None and tolerance.largest > PLAUSIBLE * tolerance.floor:
        worst = reference.compared.worst[0]
        reason = (
            f"{told}, in {tolerance.dtype}, where rounding explains at most {PLAUSIBLE * tolerance.floor:.2g} (request "
            f"{worst.index}, token {worst.position} of its {worst.part}): nothing can be compared with such a reference"
        )
        yield CheckResult(cell=cell, criterion=what, verdict=Verdict.NO_VERDICT, reason=reason)
        return
    yield CheckResult(cell=cell, criterion=what, verdict=Verdict.PASS, reason=told)


def judge_route(route: ComparedRoute, tolerance: Tolerance | None) -> Iterator[CheckResult]:
    """Judges a route. ``tolerance`` None: there is no yardstick and thus no verdict."""
    yield _answered(route)
    yield from _named(route)
    if route.evidence.is_checked:
        yield _happened(route)
    if tolerance is None or not route.compared.requests:
        why = "there is no yardstick" if tolerance is None else "no request was answered on both sides"
        for criterion in (_DIVERGENCES, _LARGEST, _MEAN):
            yield CheckResult(cell=route.route, criterion=criterion, verdict=Verdict.NO_VERDICT, reason=why)
        return
    yield _tokens(route, tolerance)
    yield _logprobs(route, tolerance)
    yield _mean(route, tolerance)


def judge_fault(fault: str, route: ComparedRoute | None) -> CheckResult:
    """Judges whether KV was corrupted at all; otherwise the run doesn't test the check.

    ``route``: the one with handoffs; None: not compared.
    """
    cell, criterion = "disagg" if route is None else route.route, "planted_fault"
    count = None if route is None else route.evidence.corrupted
    if count:
        reason = f"{count} handoffs were corrupted on purpose (TRTX_FAULT={fault})"
        return CheckResult(cell=cell, criterion=criterion, verdict=Verdict.PASS, reason=reason)
    if route is None:
        reason = "no route with handoffs was compared; ask for disagg with --routes"
    elif count is None:
        reason = "the workers did not say how many handoffs they corrupted"
    else:
        reason = "no handoff was corrupted: there were too few, or their requests ended first; send more with --prompts"
    return CheckResult(
        cell=cell, criterion=criterion, verdict=Verdict.NO_VERDICT, reason=f"TRTX_FAULT={fault}: {reason}"
    )


def _answered(route: ComparedRoute) -> CheckResult:
    criterion, count = "unanswered:count:le:0", len(route.failures)
    if not count:
        reason = f"all {route.sent} requests have their answers"
        return CheckResult(cell=route.route, criterion=criterion, verdict=Verdict.PASS, reason=reason)
    told = "; ".join(route.failures[:_TOLD])
    more = f"; and {count - _TOLD} more" if count > _TOLD else ""
    return CheckResult(
        cell=route.route, criterion=criterion, verdict=Verdict.FAILED, value=float(count), limit=0.0,
        reason=f"{count} of {route.sent} requests have no whole answer: {told}{more}",
    )  # fmt: skip


def _named(route: ComparedRoute) -> Iterator[CheckResult]:
    """No verdict if several models answered, since their answers don't describe the requested one."""
    if route.others is not None and route.others.are_several:
        yield CheckResult(
            cell=route.route, criterion="named_models", verdict=Verdict.NO_VERDICT, reason=route.others.sentence
        )


def _happened(route: ComparedRoute) -> CheckResult:
    counted = ", ".join(f"{one.what} {'–' if one.value is None else one.value}" for one in route.evidence.counts)
    if (missing := route.evidence.missing) is None:
        return CheckResult(cell=route.route, criterion="happened", verdict=Verdict.PASS, reason=counted)
    return CheckResult(
        cell=route.route, criterion="happened", verdict=Verdict.NO_VERDICT, reason=f"{missing} ({counted})"
    )


def _tokens(route: ComparedRoute, tolerance: Tolerance) -> CheckResult:
    found, limit, criterion = route.compared, tolerance.most, _DIVERGENCES
    is_exact = tolerance.floor == 0.0  # then tokens of equal likelihood are no excuse either
    wrong = [one for one in found.divergences if is_exact or one.distance > limit or -1 in (one.expected, one.found)]
    value = float(len(wrong))
    same = f"{found.identical} of {found.requests} answers are the reference's, token for token"
    ended = any(-1 in (one.expected, one.found) for one in wrong)
    if wrong and not ended and (doubt := _doubt(tolerance, wrong[0].distance)) is not None:
        reason = (
            f"{len(wrong)} answers differ where two tokens were up to {wrong[0].distance:.2g} apart; {doubt}; {same}"
        )
        return CheckResult(
            cell=route.route, criterion=criterion, verdict=Verdict.NO_VERDICT, reason=reason, value=value
        )
    if not wrong:
        first = found.divergences[0] if found.divergences else None
        ties = "" if first is None else (
            f"; {len(found.divergences)} differ from where two tokens were as likely as rounding tells, such as "
            f"request {first.index} at token {first.position} ({first.distance:.2g} apart, {limit:.2g} allowed)"
        )  # fmt: skip
        return CheckResult(cell=route.route, criterion=criterion, verdict=Verdict.PASS, reason=same + ties, value=value)
    told = "; ".join(
        f"request {one.index} differs at token {one.position} of its answer ({one.found} in place of {one.expected}, "
        f"log-probabilities {one.distance:.2g} apart, {limit:.2g} allowed)"
        for one in wrong[:_TOLD]
    )
    more = f"; and {len(wrong) - _TOLD} more requests" if len(wrong) > _TOLD else ""
    return CheckResult(
        cell=route.route, criterion=criterion, verdict=Verdict.MISSED, value=value, reason=f"{told}{more}; {same}"
    )


def _logprobs(route: ComparedRoute, tolerance: Tolerance) -> CheckResult:
    found, limit = route.compared, tolerance.most
    worst, far = found.worst[0], [one for one in found.worst if one.distance > limit]
    positions = f"{found.answer_positions} positions of answers and {found.prompt_positions} of prompts"
    if not far:
        reason = f"at most {worst.distance:.2g} apart over {positions}; {limit:.2g} allowed"
        verdict = Verdict.PASS
    else:
        told = "; ".join(
            f"request {one.index}, token {one.position} of its {one.part}: {one.distance:.2g} apart"
            for one in far[:_TOLD]
        )
        more = f"; and {len(far) - _TOLD} more requests" if len(far) > _TOLD else ""
        reason, verdict = f"{told}{more}; {limit:.2g} allowed, over {positions}", Verdict.MISSED
        if (doubt := _doubt(tolerance, worst.distance)) is not None:
            reason, verdict = f"{reason}; {doubt}", Verdict.NO_VERDICT
    return CheckResult(
        cell=route.route,
        criterion=_LARGEST,
        verdict=verdict,
        reason=reason,
        value=worst.distance,
        limit=limit,
    )


def _mean(route: ComparedRoute, tolerance: Tolerance) -> CheckResult:
    interval, limit = route.compared.mean, tolerance.most_mean
    if tolerance.floor == 0.0:  # without sampling: a single distance above 0 breaks the promise
        estimate = route.compared.mean_distance
        verdict = Verdict.MISSED if estimate > 0.0 else Verdict.PASS
        reason = f"{estimate:.2g} on average; 0 allowed"
    elif interval is None:
        verdict, reason = Verdict.NO_VERDICT, "too few requests for an interval; send more with --prompts"
    else:
        told = f"{interval.estimate:.2g} on average ({interval.low:.2g} to {interval.high:.2g}); {limit:.2g} allowed"
        if interval.high <= limit:
            verdict, reason = Verdict.PASS, told
        elif interval.low > limit:
            verdict, reason = Verdict.MISSED, told
            if (doubt := _doubt(tolerance, interval.estimate * MEAN_SHARE)) is not None:
                verdict, reason = Verdict.NO_VERDICT, f"{told}; {doubt}"
        else:
            verdict, reason = Verdict.NO_VERDICT, f"{told}; its interval holds both, send more with --prompts"
    return CheckResult(
        cell=route.route, criterion=_MEAN, verdict=verdict, reason=reason,
        value=route.compared.mean_distance, interval=interval, limit=limit,
    )  # fmt: skip


def _doubt(tolerance: Tolerance, distance: float) -> str | None:
    """Returns why a distance above that of identical runs may still be rounding; None: it can't be."""
    widest = max(FLOOR.values())
    if tolerance.floor is not None or distance > widest:
        return None
    return (
        "the data type of the computation is not known, and half precision alone rounds by up to "
        f"{widest:.2g}; give it with --dtype for --url, else as dtype in the engine config"
    )

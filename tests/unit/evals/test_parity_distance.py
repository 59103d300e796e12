"""How far two answers are said to be apart, and what follows from it: on answers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtx.bench.judge.judgement import CheckResult, Verdict, outcome
from trtx.evals.parity import ComparedRoute, ParityAnswer, compare_route, distance, judge_route
from trtx.evals.parity.forms import Count, RouteEvidence, Tolerance
from trtx.evals.parity.gate import FLOOR, judge_fault, judge_reference, no_tolerance, tolerance_of

HAPPENED = RouteEvidence((Count("handoffs", 12),), None)
EPS = FLOOR["float32"] / 100  # whatever it is


def answer(index: int = 0, tokens: tuple[int, ...] = (7, 8, 9), shift: float = 0.0) -> ParityAnswer:
    """Two likeliest tokens at each position, the chosen one first; ``shift`` moves the last one's log-probability."""
    values = [-0.5] * (len(tokens) - 1) + [-0.5 + shift]
    return ParityAnswer(
        index=index,
        token_ids=tokens,
        logprobs=tuple(values),
        top=tuple({str(token): value, "1": -2.0} for token, value in zip(tokens, values, strict=True)),
        prompt_logprobs=(-3.0, -4.0),
        finish_reason="length",
        prompt_tokens=3,
        cached_tokens=0,
        workers={},
        resent=0,
        attempts=1,
        failure=None,
    )


def route(*others: ParityAnswer, evidence: RouteEvidence = HAPPENED) -> ComparedRoute:
    """Twelve answers that are the reference's, but those given."""
    given = {one.index: one for one in others}
    reference = [answer(index) for index in range(12)]
    found = [given.get(index, one) for index, one in enumerate(reference)]
    return compare_route("disagg", reference, found, model="m", cancelled=3, evidence=evidence)


def tolerance() -> Tolerance:
    again = compare_route("agg", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    return tolerance_of(again.compared, "float32")


def judged(found: ComparedRoute) -> dict[str, CheckResult]:
    return {one.criterion.partition(":le:")[0]: one for one in judge_route(found, tolerance())}


def test_a_position_is_as_far_as_its_farthest_token() -> None:
    other = replace(answer(), top=({"7": -0.5, "1": -2.5}, *answer().top[1:]))
    assert distance(answer(), other).answer == (0.5, 0.0, 0.0)


def test_a_token_that_one_side_does_not_name_is_at_least_as_far_as_the_last_that_it_names() -> None:
    other = replace(answer(), top=({"7": -0.5, "2": -1.25}, *answer().top[1:]))
    assert distance(answer(), other).answer[0] == 0.75
    assert distance(other, answer()).answer[0] == 0.75


def test_what_follows_another_token_is_not_compared() -> None:
    reference = replace(answer(), top=({"7": -0.5}, {"8": -0.5, "5": -0.5}, {"9": -0.5}))
    other = replace(answer(tokens=(7, 5, 9), shift=3.0), top=({"7": -0.5}, {"5": -0.5, "8": -0.5}, {"9": 2.5}))
    found = distance(reference, other)
    assert (found.divergence, found.answer) == (1, (0.0, 0.0)), "a tie: each side names both, as likely as each other"


def test_an_answer_that_ends_early_diverges_at_its_end() -> None:
    assert distance(answer(), answer(tokens=(7, 8))).divergence == 2
    assert judged(route(answer(4, (7, 8))))["unexplained_divergences:count"].verdict is Verdict.MISSED


def test_prompts_are_compared_where_both_sides_say() -> None:
    moved = replace(answer(), prompt_logprobs=(-3.0, -4.25))
    assert distance(answer(), moved).prompt == (0.0, 0.25)
    assert distance(answer(), replace(answer(), prompt_logprobs=())).prompt == ()


def test_equal_answers_pass_and_every_judgement_counts() -> None:
    found = judged(route())
    assert len(found) == 5 and {one.verdict for one in found.values()} == {Verdict.PASS}


@pytest.mark.parametrize(("shift", "verdict"), [(99 * EPS, Verdict.PASS), (101 * EPS, Verdict.MISSED)])
def test_one_log_probability_beyond_the_floor_fails_and_is_named(shift: float, verdict: Verdict) -> None:
    judgement = judged(route(answer(5, shift=shift)))["logprob_distance:max"]
    assert judgement.verdict is verdict
    assert verdict is Verdict.PASS or "request 5, token 2 of its answer" in judgement.reason


def test_a_prompts_log_probability_counts_as_much() -> None:
    judgement = judged(route(replace(answer(8), prompt_logprobs=(-3.0, -4.001))))["logprob_distance:max"]
    assert judgement.verdict is Verdict.MISSED and "request 8, token 2 of its prompt" in judgement.reason


def test_another_token_passes_at_a_tie_alone() -> None:
    tie = replace(answer(3, (7, 5, 9)), top=({"7": -0.5, "1": -2.0}, {"5": -0.5, "8": -0.5}, {"9": -0.5, "1": -2.0}))
    both = [replace(answer(index), top=({"7": -0.5, "1": -2.0}, {"8": -0.5, "5": -0.5}, {"9": -0.5, "1": -2.0}))
            for index in range(12)]  # fmt: skip
    found = compare_route(
        "kv", both, [tie if one.index == 3 else one for one in both], model="m", cancelled=0, evidence=HAPPENED
    )
    at_a_tie = judged(found)["unexplained_divergences:count"]
    assert at_a_tie.verdict is Verdict.PASS and "request 3 at token 1" in at_a_tie.reason
    clear = judged(route(replace(answer(3, (7, 5, 9)))))["unexplained_divergences:count"]
    assert clear.verdict is Verdict.MISSED
    assert "request 3 differs at token 1 of its answer (5 in place of 8" in clear.reason


def test_many_that_are_a_little_off_show_in_the_mean_alone() -> None:
    off = [replace(answer(index), prompt_logprobs=(-3 - 99 * EPS, -4 + 99 * EPS)) for index in range(12)]
    found = judged(route(*off))
    assert found["logprob_distance:max"].verdict is Verdict.PASS
    assert found["logprob_distance:mean"].verdict is Verdict.MISSED


def test_a_request_without_its_answer_fails_and_is_not_compared() -> None:
    found = route(replace(answer(2), failure="HTTP 500: gone", token_ids=()))
    assert found.compared.requests == 11
    judgement = judged(found)["unanswered:count"]
    assert judgement.verdict is Verdict.FAILED and "request 2: HTTP 500: gone" in judgement.reason


def test_a_route_that_nobody_saw_happen_has_no_verdict() -> None:
    found = route(evidence=RouteEvidence((Count("handoffs", None),), "the workers do not count their handoffs"))
    assert judged(found)["happened"].verdict is Verdict.NO_VERDICT
    error = outcome(list(judge_route(found, tolerance())))
    assert error is not None and error.exit_code == 3


def test_bad_news_counts_where_a_route_was_not_seen_to_happen_too() -> None:
    found = route(answer(5, shift=1.0), evidence=RouteEvidence((), "nobody counted"))
    error = outcome(list(judge_route(found, tolerance())))
    assert error is not None and error.exit_code == 1


def test_what_identical_runs_show_is_the_yardstick_beyond_the_floor() -> None:
    again = compare_route("agg", [answer()], [answer(shift=0.1)], model="m", cancelled=0, evidence=HAPPENED)
    assert tolerance_of(again.compared, "bfloat16").most == pytest.approx(0.4)
    assert tolerance_of(again.compared, None).most == pytest.approx(0.4)
    assert tolerance().most == FLOOR["float32"]


def test_a_reference_that_is_far_from_itself_is_none() -> None:
    again = compare_route("agg", [answer()], [answer(shift=0.1)], model="m", cancelled=0, evidence=HAPPENED)
    judgements = list(judge_reference(again, tolerance_of(again.compared, "float32")))
    assert [one.verdict for one in judgements] == [Verdict.PASS, Verdict.NO_VERDICT]
    assert "nothing can be compared with such a reference" in judgements[1].reason


def test_where_the_same_bits_are_promised_nothing_is_allowed() -> None:
    again = compare_route("agg", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    none = no_tolerance(again.compared, "float32")
    assert {one.verdict for one in judge_reference(again, none)} == {Verdict.PASS}
    assert {one.verdict for one in judge_route(route(), none)} == {Verdict.PASS}
    tiny = {one.criterion.partition(":")[0]: one.verdict for one in judge_route(route(answer(5, shift=1e-7)), none)}
    assert (
        tiny["logprob_distance"] is not Verdict.PASS
        and judged(route(answer(5, shift=1e-7)))["logprob_distance:max"].verdict is Verdict.PASS
    )

    apart = compare_route("agg", [answer()], [answer(shift=1e-7)], model="m", cancelled=0, evidence=HAPPENED)
    judgements = list(judge_reference(apart, no_tolerance(apart.compared, "float32")))
    assert [one.verdict for one in judgements] == [Verdict.PASS, Verdict.MISSED]
    assert "--deterministic promises the same bits" in judgements[1].reason


@pytest.mark.parametrize("others", [0, 1, 40])
def test_one_request_of_many_that_is_a_little_off_breaks_the_promise_of_bits(others: int) -> None:
    again = compare_route("agg", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    answers = [answer(index) for index in range(others + 1)]
    found = compare_route(
        "disagg", answers, [answer(0, shift=1e-7), *answers[1:]], model="m", cancelled=0, evidence=HAPPENED
    )
    of = {one.criterion: one.verdict for one in judge_route(found, no_tolerance(again.compared, "float32"))}
    assert of["logprob_distance:max:le:yardstick"] is of["logprob_distance:mean:le:yardstick"] is Verdict.MISSED


def test_a_tie_is_none_where_the_same_bits_are_promised() -> None:
    again = compare_route("agg", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    other = replace(
        answer(5), token_ids=(1, *answer(5).token_ids[1:]), top=({"7": -0.5, "1": -0.5}, *answer(5).top[1:])
    )
    equal = replace(other, token_ids=answer(5).token_ids)
    found = compare_route("disagg", [equal], [other], model="m", cancelled=0, evidence=HAPPENED)
    (divergence,) = found.compared.divergences
    assert divergence.distance == 0.0
    of = {one.criterion: one.verdict for one in judge_route(found, no_tolerance(again.compared, "float32"))}
    assert of["unexplained_divergences:count:le:0"] is Verdict.MISSED


def test_without_a_yardstick_there_is_no_verdict() -> None:
    assert Verdict.PASS not in {one.verdict for one in list(judge_route(route(), None))[2:]}


def test_of_a_server_that_nobody_looks_into_no_route_is_claimed() -> None:
    found = judged(route(evidence=RouteEvidence((), None, is_checked=False)))
    assert "happened" not in found and {one.verdict for one in found.values()} == {Verdict.PASS}


FAULT = "swap-block:every=100,layer=0"


@pytest.mark.parametrize(
    ("corrupted", "verdict", "said"),
    [
        (3, Verdict.PASS, "3 handoffs were corrupted on purpose"),
        (0, Verdict.NO_VERDICT, "no handoff was corrupted"),
        (None, Verdict.NO_VERDICT, "did not say how many"),
    ],
)
def test_a_planted_fault_that_did_nothing_is_no_verdict(corrupted: int | None, verdict: Verdict, said: str) -> None:
    judgement = judge_fault(FAULT, route(evidence=RouteEvidence((), None, corrupted=corrupted)))
    assert (judgement.cell, judgement.verdict) == ("disagg", verdict) and said in judgement.reason
    assert FAULT in judgement.reason


def test_a_planted_fault_needs_a_route_with_handoffs() -> None:
    judgement = judge_fault(FAULT, None)
    assert judgement.verdict is Verdict.NO_VERDICT and "ask for disagg with --routes" in judgement.reason


@pytest.mark.parametrize(
    ("shift", "dtype", "verdict"),
    [
        (0.2, None, Verdict.NO_VERDICT),
        (0.3, None, Verdict.MISSED),
        (0.2, "bfloat16", Verdict.PASS),
        (0.2, "float32", Verdict.MISSED),
    ],
)
def test_what_half_precision_may_round_is_no_verdict_where_nobody_said_the_precision(
    shift: float, dtype: str | None, verdict: Verdict
) -> None:
    again = compare_route("against", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    found = list(judge_route(route(answer(5, shift=shift)), tolerance_of(again.compared, dtype)))
    judgement = next(one for one in found if one.criterion.startswith("logprob_distance:max"))
    assert judgement.verdict is verdict
    assert ("give it with --dtype for --url" in judgement.reason) == (verdict is Verdict.NO_VERDICT)


def test_an_answer_that_ends_elsewhere_is_missed_whatever_the_precision() -> None:
    again = compare_route("against", [answer()], [answer()], model="m", cancelled=0, evidence=HAPPENED)
    found = list(judge_route(route(answer(4, (7, 8))), tolerance_of(again.compared, None)))
    assert next(one for one in found if one.criterion.startswith("unexplained")).verdict is Verdict.MISSED

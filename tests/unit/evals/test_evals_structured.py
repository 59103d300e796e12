"""The outcome of an answer to a request with a schema, and the difference between both arms over the same samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtx.evals.forms import Arm, Judged, Sample, SampleRequest, Score, ScoredTask
from trtx.evals.structured import arm_differences, with_outcome

OBJECT = '{"a": 1}'


def answer(text: str | None, finish: str | None = "stop", refusal: str | None = None) -> SampleRequest:
    return SampleRequest("generate_until", "a", None, {}, text, None, None, finish, (), refusal)


def outcome(arm: Arm, valid: int, given: SampleRequest) -> dict[str, int]:
    judged = Judged("none", (given.text,), {"schema_compliance": valid, "json_validity": valid})
    (found,) = with_outcome((judged,), (given,), arm)
    return found.metrics


@pytest.mark.parametrize("arm", ["free", "constrained"])
@pytest.mark.parametrize(
    ("valid", "given", "name"),
    [
        (1, answer(OBJECT), "schema_compliance"),
        (1, answer(OBJECT, "length"), "schema_compliance"),
        (0, answer('{"b": 1}'), "schema_broken"),
        (0, answer("red"), "schema_broken"),
        (0, answer('{"a": ', "length"), "answer_cut"),
    ],
)
def test_every_answer_has_exactly_one_outcome(arm: Arm, valid: int, given: SampleRequest, name: str) -> None:
    outcomes = ("schema_compliance", "schema_broken", "answer_cut", "schema_refused")
    metrics = outcome(arm, valid, given)
    assert [one for one in outcomes if metrics.get(one)] == [name]


def test_a_refused_schema_is_an_outcome_of_the_constrained_arm_alone() -> None:
    found = outcome("constrained", 0, answer(None, None, "HTTP 400: no"))
    assert [name for name, value in found.items() if value] == ["schema_refused"]
    assert "schema_refused" not in outcome("free", 0, answer("red"))


@pytest.mark.parametrize("text", [f"```json\n{OBJECT}\n```", "NaN", f"{OBJECT} ok"])
def test_a_constrained_answer_must_be_json_as_a_whole_even_if_the_task_accepts_it(text: str) -> None:
    kept = {"json_validity": 1, "schema_compliance": 1, "schema_broken": 0, "answer_cut": 0}
    assert outcome("free", 1, answer(text)) == kept
    broken = {"json_validity": 0, "schema_compliance": 0, "schema_broken": 1, "answer_cut": 0, "schema_refused": 0}
    assert outcome("constrained", 1, answer(text)) == broken


def scored(task: str, arm: Arm | None, values: dict[int, int]) -> tuple[ScoredTask, list[Sample]]:
    found = [
        Sample(task, doc_id, str(doc_id), {}, "", (answer(OBJECT),), (Judged("none", (), {"exact_match": value}),))
        for doc_id, value in values.items()
    ]
    share = sum(values.values()) / max(1, len(values))
    score = Score("exact_match", "none", None, share, "binomial", higher_is_better=True)
    return ScoredTask(task, "generate_until", None, 0, 40, len(values), (score,), (), arm=arm), found


def test_the_arms_are_compared_over_the_samples_that_both_answered() -> None:
    free, of_free = scored("own", "free", dict.fromkeys(range(40), 0))
    constrained, of_constrained = scored("own-constrained", "constrained", dict.fromkeys(range(2, 50), 1))
    other, of_other = scored("other", None, {1: 1})
    samples = {"own": of_free, "own-constrained": of_constrained, "other": of_other}
    (found,) = arm_differences((free, constrained, other), samples)
    assert (found.task, found.metric, found.pairs, found.reason) == ("own", "exact_match", 38, None)
    assert found.difference is not None and found.difference.estimate == 1 and 0.7 < found.difference.low < 1
    assert found.difference.confidence == 0.95
    second = (replace(free, task="b"), replace(constrained, task="b-constrained"))
    both = arm_differences((free, constrained, *second), samples | {"b": of_free, "b-constrained": of_constrained})
    assert [one.difference.confidence for one in both if one.difference] == [0.975, 0.975], "95 % for both tasks"


def test_arms_without_a_common_sample_or_without_a_score_have_no_difference() -> None:
    free, of_free = scored("own", "free", {1: 0})
    constrained, of_constrained = scored("own-constrained", "constrained", {2: 1})
    samples = {"own": of_free, "own-constrained": of_constrained}
    (found,) = arm_differences((free, constrained), samples)
    assert found.difference is None and found.reason == "no sample has a value in both arms"
    assert arm_differences((free, replace(constrained, scores=(), note="refused")), samples) == ()
    assert arm_differences((free,), samples) == ()

"""Verdicts on scores: three-way, on the interval, and nothing is passed that nobody could judge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.errors import UsageError
from trtx.evals import Score, ScoredTask, TopologyScores, statistics
from trtx.evals.forms import Judged, Sample, Unanswered
from trtx.evals.gate import (
    check_max_drop,
    check_min_scores,
    judge_answers,
    judge_difference,
    judge_min_score,
    parse_min_score,
)
from trtx.evals.pairs import TaskValues, TopologyValues, Value, by_key, paired_differences
from trtx.stats.intervals import CONFIDENCE, Interval


def score(low: float, value: float, high: float, *, better: bool | None = True, filter: str = "none") -> Score:
    return Score("acc", filter, Interval(value, low, high, CONFIDENCE), value, "binomial", better)


def task(*scores: Score, samples: int = 10, answered: int = 10, note: str | None = None) -> ScoredTask:
    reasons = (
        (Unanswered("HTTP 500: oh", samples - answered, 3),) if 0 < answered < samples else ()
    )  # or it was not asked
    return ScoredTask("sums", "generate_until", "1", 0, samples, answered, scores, reasons, note)


def of(*tasks: ScoredTask) -> TopologyScores:
    return TopologyScores("agg", "0.4.13", "completions", None, None, tasks)


def judged(bound: str, *scores: Score, note: str | None = None) -> CheckResult:
    return judge_min_score(of(task(*scores, note=note)), parse_min_score(f"sums:{bound}"))


@pytest.mark.parametrize(
    ("bound", "verdict"), [("acc:0.5", Verdict.PASS), ("acc:0.7", Verdict.NO_VERDICT), ("acc:0.9", Verdict.MISSED)]
)
def test_a_least_score_is_decided_on_the_interval(bound: str, verdict: Verdict) -> None:
    assert judged(bound, score(0.6, 0.7, 0.8)).verdict is verdict


@pytest.mark.parametrize(
    ("bound", "verdict"), [("acc:0.5", Verdict.MISSED), ("acc:0.7", Verdict.NO_VERDICT), ("acc:0.9", Verdict.PASS)]
)
def test_of_a_metric_that_is_better_low_it_is_the_most(bound: str, verdict: Verdict) -> None:
    found = judged(bound, score(0.6, 0.7, 0.8, better=False))
    assert found.verdict is verdict and ":le:" in found.criterion and "at most" in found.reason


def test_a_task_without_its_score_or_interval_has_no_verdict() -> None:
    assert judged("acc:0.5", note="no logprobs").verdict is Verdict.NO_VERDICT
    assert "no logprobs" in judged("acc:0.5", note="no logprobs").reason
    assert judged("acc:0.5", Score("acc", "none", None, 0.9, "bootstrap", True)).verdict is Verdict.NO_VERDICT


def binomial(ones: int, count: int, *, better: bool = True) -> Score:
    interval = statistics.share_interval([1] * ones + [0] * (count - ones))
    return Score("acc", "none", interval, ones / count, "binomial", better)


def lacking(bound: float, ones: int, answered: int, samples: int, *, better: bool = True) -> CheckResult:
    scored = task(binomial(ones, answered, better=better), samples=samples, answered=answered)
    return judge_min_score(of(scored), parse_min_score(f"sums:acc:{bound}"))


def test_samples_without_an_answer_decide_as_the_worst_and_the_best_that_they_could_be() -> None:
    found = lacking(0.6, 8, 8, 10)  # of the eight alone: 0.68 to 1
    assert found.verdict is Verdict.NO_VERDICT and found.value == 1.0
    assert found.reason.startswith("2 of 10 samples without an answer") and "--resume" in found.reason
    assert lacking(0.6, 98, 98, 100).verdict is Verdict.PASS
    assert lacking(0.6, 10, 98, 100).verdict is Verdict.MISSED
    assert lacking(0.6, 3, 8, 100).verdict is Verdict.NO_VERDICT  # of the eight: at most 0.7, but 92 could be right
    assert lacking(0.6, 10, 98, 100, better=False).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [("a", "a", Verdict.PASS), ("a", "b", Verdict.NO_VERDICT), (None, "b", Verdict.PASS), ("a", None, Verdict.PASS)],
)
def test_samples_that_were_graded_in_another_way_are_no_pairs(
    before: str | None, now: str | None, verdict: Verdict
) -> None:
    values: dict[str, Value] = {str(place): 1.0 for place in range(200)}
    both = [
        TopologyValues(
            "agg", "0.4.13", "completions", None, (TaskValues("sums", "acc", 1.0, True, 0, values, grading=one),)
        )
        for one in (now, before)
    ]
    (found,) = paired_differences(*both)
    judged = judge_difference("agg", found, "agg", 0.1)
    assert judged.verdict is verdict
    assert verdict is Verdict.PASS or "sums was graded in another way then: its targets, filters" in judged.reason


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 10), st.floats(0, 1), st.booleans())
def test_no_value_of_a_lost_sample_turns_a_verdict(
    answered: int, ones: int, lost: int, bound: float, better: bool
) -> None:
    ones, samples = min(ones, answered), answered + lost
    found = lacking(bound, ones, answered, samples, better=better)
    whole = [
        judge_min_score(
            of(task(binomial(ones + right, samples, better=better), samples=samples, answered=samples)),
            parse_min_score(f"sums:acc:{bound}"),
        ).verdict
        for right in range(lost + 1)
    ]
    if found.verdict is not Verdict.NO_VERDICT:
        assert set(whole) == {found.verdict}


def test_a_score_without_bounds_has_no_verdict_while_samples_lack_an_answer() -> None:
    mean = Score("bleu", "none", Interval(30.0, 28.0, 32.0, CONFIDENCE), 30.0, "bootstrap", True)
    found = judge_min_score(of(task(mean, answered=9)), parse_min_score("sums:bleu:20"))
    assert found.verdict is Verdict.NO_VERDICT and "1 of 10 samples without an answer" in found.reason


def test_a_filter_can_be_named_and_the_first_is_meant_where_none_is() -> None:
    both = score(0.6, 0.7, 0.8, filter="strict"), score(0.1, 0.2, 0.3, filter="loose")
    assert judged("acc:0.5", *both).verdict is Verdict.PASS
    assert judged("acc,strict:0.5", *both).verdict is Verdict.PASS
    assert judged("acc,loose:0.5", *both).verdict is Verdict.MISSED


@pytest.mark.parametrize("text", ["sums", "sums:acc", "sums:acc:", "sums:acc:much", "sums:acc:nan", "::1"])
def test_what_is_no_least_score_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--min-score"):
        parse_min_score(text)


def test_a_task_or_metric_that_is_not_there_is_refused_before_anything_is_asked() -> None:
    known = {"sums": ("acc",), "words": ("exact_match",)}
    check_min_scores([parse_min_score("sums:acc:1"), parse_min_score("words:exact_match,strict:1")], known, {})
    with pytest.raises(UsageError, match="tales is not among the tasks; expected one of sums, words"):
        check_min_scores([parse_min_score("tales:acc:1")], known, {})
    with pytest.raises(UsageError, match="bleu is not a metric of sums; expected one of acc"):
        check_min_scores([parse_min_score("sums:bleu:1")], known, {})


@pytest.mark.parametrize("value", ["1.5", "80", "-0.1"])
def test_a_least_score_that_a_share_can_not_have_is_refused(value: str) -> None:
    known = {"sums": ("acc", "bleu")}
    with pytest.raises(UsageError, match="acc,strict lies between 0 and 1"):
        check_min_scores([parse_min_score(f"sums:acc,strict:{value}")], known, {"sums": ("acc",)})
    check_min_scores([parse_min_score(f"sums:bleu:{value}")], known, {"sums": ("acc",)})
    check_min_scores([parse_min_score("sums:acc:1"), parse_min_score("sums:acc:0")], known, {"sums": ("acc",)})


def test_a_drop_that_no_share_can_have_is_refused() -> None:
    check_max_drop(5, [])  # of a perplexity
    check_max_drop(0.99, ["acc of sums"])
    with pytest.raises(UsageError, match="--max-drop is 5, and acc of sums lies between 0 and 1, so no score could be"):
        check_max_drop(5, ["acc of sums"])
    for none in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a number above 0"):
            check_max_drop(none, [])


def test_samples_without_an_answer_fail_their_task_and_a_task_that_was_not_scored_has_no_verdict() -> None:
    assert judge_answers("agg", task(score(0.6, 0.7, 0.8))).verdict is Verdict.PASS
    lacking = judge_answers("agg", task(score(0.6, 0.7, 0.8), answered=8))
    assert (
        lacking.verdict is Verdict.FAILED
        and "2 of 10 samples without an answer: sample 3: HTTP 500: oh" in lacking.reason
    )
    assert judge_answers("agg", task(answered=0, note="no logprobs")).verdict is Verdict.NO_VERDICT


def test_why_a_task_has_no_score_hides_no_sample_without_an_answer() -> None:
    found = judge_answers("agg", task(answered=8, note="all 8 answers are empty"))
    assert found.verdict is Verdict.FAILED
    assert found.reason == (
        "2 of 10 samples without an answer: sample 3: HTTP 500: oh, and 1 more like it; all 8 answers are empty"
    )


def difference(candidate: list[int], baseline: list[int], *, better: bool = True, drop: float = 0.1) -> CheckResult:
    sides = [
        TaskValues("sums", "acc", 0.5, better, 0, {str(place): float(value) for place, value in enumerate(side)})
        for side in (candidate, baseline)
    ]
    both = [TopologyValues("agg", "0.4.13", "completions", None, (side,)) for side in sides]
    (found,) = paired_differences(*both)
    return judge_difference("agg", found, "agg", drop)


def test_equal_answers_pass_and_far_fewer_right_ones_regress() -> None:
    right, wrong = [1] * 100, [1] * 50 + [0] * 50
    assert difference(right, right).verdict is Verdict.PASS
    assert difference(wrong, right).verdict is Verdict.REGRESSED
    assert difference(right, wrong).verdict is Verdict.PASS
    assert difference(wrong, right, better=False).verdict is Verdict.PASS
    assert difference([1] * 10, [1] * 10).verdict is Verdict.NO_VERDICT  # too few to say that it is less than 0.1


def test_samples_that_only_one_run_has_are_no_pairs() -> None:
    found = difference([1] * 100, [1] * 90)
    assert found.verdict is Verdict.NO_VERDICT and "90 samples in both runs" in found.reason


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=80))
def test_a_verdict_says_of_the_interval_what_stands_beside_it(pairs: list[tuple[int, int]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = difference(first, second)
    interval = statistics.difference_interval([*map(float, first)], [*map(float, second)])
    assert isinstance(interval, Interval) and found.interval == interval
    assert (found.verdict is Verdict.PASS) == (interval.low >= -0.1)
    assert (found.verdict is Verdict.REGRESSED) == (interval.high < -0.1)


def test_a_metrics_values_are_those_of_its_filter_and_rows_that_ask_the_same_stay_apart() -> None:
    def sample(number: int, key: str, strict: object, loose: object) -> Sample:
        judged = (Judged("strict", (), {"acc": strict}), Judged("loose", (), {"acc": loose}))
        return Sample("sums", number, key, {}, None, (), judged)

    samples = [sample(0, "a", 1, 0), sample(1, "b", "nan", 0), sample(2, "a", 0, 0)]
    assert by_key(samples, score(0, 0.5, 1, filter="strict")) == {"a": 1.0, "a#1": 0.0}
    assert list(by_key(samples, score(0, 0.5, 1, filter="loose")).values()) == [0.0, 0.0, 0.0]


def perplexity(values: list[object]) -> dict[str, Value]:
    """Of samples with these values, by the key of each."""
    samples = [
        Sample("text", place, str(place), {}, None, (), (Judged("none", (), {"acc": value}),))
        for place, value in enumerate(values)
    ]
    return by_key(samples, RATIO)


RATIO = Score("acc", "none", None, 8.0, "bootstrap", False, aggregation="bits_per_byte")


def compared(score: Score, candidate: dict[str, Value], baseline: dict[str, Value]) -> CheckResult:
    """Two runs of one task with this score, which may be 0.05 worse."""
    sides = (
        TaskValues("text", score.name, score.value, score.higher_is_better, 0, samples, score.aggregation)
        for samples in (candidate, baseline)
    )
    both = [TopologyValues("agg", "0.4.13", "completions", None, (side,)) for side in sides]
    (found,) = paired_differences(*both)
    return judge_difference("agg", found, "agg", 0.05)


def test_a_score_that_is_a_ratio_of_sums_is_compared_by_its_own_aggregation() -> None:
    before = [[-20.0 - place % 40, 8 + place % 5] for place in range(400)]
    assert perplexity([*before, "nan", [1.0]]).keys() == perplexity(list(before)).keys()

    def judge(share: float) -> CheckResult:
        after = perplexity([[share * logprob, size] for logprob, size in before])
        return compared(RATIO, after, perplexity(list(before)))

    assert (judge(1.0).verdict, judge(1.0).value) == (Verdict.PASS, 0)
    assert judge(1.2).verdict is Verdict.REGRESSED and "+1.1" in judge(1.2).reason
    assert judge(0.8).verdict is Verdict.PASS
    assert judge(1.0088).verdict is Verdict.NO_VERDICT  # 0.0504, with 0.05 in its interval


def test_a_score_over_all_samples_at_once_has_no_difference() -> None:
    bleu = Score("bleu", "none", None, 8.0, "bootstrap", True, aggregation="other")
    found = compared(bleu, {}, {})
    assert found.verdict is Verdict.NO_VERDICT and "computed over all samples at once" in found.reason

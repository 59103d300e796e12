from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_samples import of_requests, of_trials, request

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.goodput import goodput, judge_goodput, request_bounds
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.sample import CellSample, parse_percent
from trtx.bench.judge.slo import judge_error_rate, judge_objective, parse_objective
from trtx.bench.metric_types import Spread, all_figures
from trtx.bench.metrics import time_to_first_token
from trtx.bench.phases import Span
from trtx.errors import UsageError

TTFT_P99 = parse_objective("time_to_first_token:p99:le:500")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("time_to_first_token:p99:le", "it has 3 of 4 parts"),
        ("time_to_first_token:p99:le:500:ms", "it has 5 of 4 parts"),
        ("time_to_first_tokn:p99:le:500", "did you mean time_to_first_token"),
        ("ttft:p99:le:500", "did you mean time_to_first_token"),
        ("token_latency:p99:le:500", "did you mean inter_token_latency"),
        ("xyz:p99:le:500", "expected one of request_count, "),
        ("input_sequence_lengths:min:ge:5", "no metric is called"),
        ("time_to_first_token:p98:le:500", "has no statistic 'p98'; expected one of avg, p50, "),
        ("output_token_throughput:p50:ge:500", "has no statistic 'p50'; expected one of avg"),
        ("output_token_throughput_per_user:avg:ge:5", "has no statistic 'avg'; expected one of p50"),
        ("time_to_first_token: p99:le:500", "has no statistic ' p99'"),
        ("time_to_first_token:p99:<=:500", "there is no operator '<='; expected lt or le"),
        ("time_to_first_token:p99:ge:500", "is better when lower, but ge requires the opposite; expected lt or le"),
        (
            "output_token_throughput:avg:lt:500",
            "is better when higher, but lt requires the opposite; expected gt or ge",
        ),
        ("time_to_first_token:p99:le:fast", "'fast' is not a number; expected one in ms"),
        ("time_to_first_token:p99:le:nan", "'nan' is not a number"),
        ("time_to_first_token:p99:le:inf", "'inf' is not a number"),
        ("time_to_first_token:p99:le:-5", "no metric is below 0, so it could never be kept; expected a value above 0"),
        ("time_to_first_token:p99:lt:0", "could never be kept"),
        ("output_token_throughput:avg:ge:0", "could never be missed"),
        ("", "it has 1 of 4 parts"),
    ],
)
def test_what_is_no_objective_is_one_sentence(typed: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_objective(typed)
    said = str(refused.value)
    assert said.startswith(f"--slo {typed}: ") and says in said and "\n" not in said


@given(
    st.sampled_from([(one, column) for one in all_figures() for column in one.columns]),
    st.sampled_from(["lt", "le", "gt", "ge"]),
    st.floats(1e-6, 1e6).map(lambda value: float(f"{value:.6g}")),
)
def test_every_column_of_a_figure_can_have_one(column: tuple[object, int | None], operator: str, value: float) -> None:
    figure, of_it = column
    typed = f"{figure.name}:{f'p{of_it}' if of_it else figure.statistic}:{operator}:{value:.10g}"  # type: ignore[attr-defined]
    asks_for = "lower" if operator in ("lt", "le") else "higher"
    if figure.better in (None, asks_for):  # type: ignore[attr-defined]
        assert parse_objective(typed).name == typed
    else:
        with pytest.raises(UsageError, match=f"is better when {figure.better}"):  # type: ignore[attr-defined]
            parse_objective(typed)


@pytest.mark.slow
def test_what_aiperf_takes_means_the_same_here() -> None:
    from aiperf.orchestrator.search_planner.parsing import parse_sla_filter

    for one in all_figures():
        for operator in ("le", "ge"):
            for column in one.columns:
                typed = f"{one.name}:{f'p{column}' if column else one.statistic}:{operator}:12.5"
                theirs = parse_sla_filter(typed)
                if one.better in (None, "lower" if operator == "le" else "higher"):
                    ours = parse_objective(typed)
                    assert (ours.metric.metric.name, ours.metric.statistic, ours.bound.operator) == (
                        theirs.metric_tag,
                        theirs.stat,
                        theirs.op,
                    )
                    assert ours.bound.threshold == theirs.threshold


@pytest.mark.parametrize(
    ("typed", "verdict"),
    [
        ("time_to_first_token:p99:le:500", Verdict.PASS),
        ("time_to_first_token:p99:lt:500", Verdict.MISSED),
        ("time_to_first_token:avg:lt:500.001", Verdict.PASS),
        ("time_to_first_token:p50:le:499.999", Verdict.MISSED),
        ("output_token_throughput:avg:ge:100", Verdict.PASS),
        ("output_token_throughput:avg:gt:100", Verdict.MISSED),
        ("output_token_throughput_per_gpu:avg:ge:50", Verdict.PASS),
        ("output_token_throughput_per_gpu:avg:ge:51", Verdict.MISSED),
        ("output_token_throughput_per_user:p50:ge:100", Verdict.PASS),
        ("request_error_rate:avg:le:0", Verdict.PASS),
    ],
)
def test_a_figure_is_held_against_its_bound(typed: str, verdict: Verdict) -> None:
    sample = of_requests([request(number, 500) for number in range(700)])  # 100 tokens/s on two GPUs, all of 500 ms
    judged = judge_objective(sample, parse_objective(typed))
    assert (judged.verdict, judged.criterion) == (verdict, typed)
    assert (judged.value, judged.limit) != (None, None)
    assert ("expected" in judged.reason) == (verdict is Verdict.MISSED)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(1, 1000))
def test_an_objective_never_passes_on_too_few_requests_nor_above_its_bound(ttfts: list[int], threshold: int) -> None:
    sample = of_requests([request(number, ttft) for number, ttft in enumerate(ttfts)])
    for statistic, needed in (("p50", 11), ("p90", 64), ("p99", 662)):
        judged = judge_objective(sample, parse_objective(f"time_to_first_token:{statistic}:le:{threshold}"))
        if judged.verdict is Verdict.PASS:
            assert len(ttfts) >= needed and judged.value is not None and judged.value <= threshold
        if judged.verdict is Verdict.MISSED:
            assert sum(ttft > threshold for ttft in ttfts) >= len(ttfts) // 100
        if max(ttfts) <= threshold:
            assert judged.verdict is (Verdict.PASS if len(ttfts) >= needed else Verdict.NO_VERDICT)


def test_a_percentile_of_too_few_requests_is_missed_where_a_smaller_one_is() -> None:
    slow = of_requests([request(number, 800) for number in range(20)])
    judged = judge_objective(slow, TTFT_P99)
    assert (judged.verdict, judged.reason) == (Verdict.MISSED, "p50 is 800 ms already; expected at most 500 ms")
    few_slow = of_requests([request(number, 800 if number > 15 else 100) for number in range(20)])
    judged = judge_objective(few_slow, TTFT_P99)
    assert judged.verdict is Verdict.NO_VERDICT
    assert "p99 needs 662 requests, but there are 20" in judged.reason


def test_the_requests_of_all_trials_count_together() -> None:
    trial = [request(number, 100) for number in range(331)]
    assert judge_objective(of_requests(trial), TTFT_P99).verdict is Verdict.NO_VERDICT
    assert judge_objective(of_requests(trial, trial), TTFT_P99).verdict is Verdict.PASS


def test_a_figure_that_is_a_median_takes_as_many_requests_as_one() -> None:
    objective = parse_objective("output_token_throughput_per_user:p50:ge:50")
    for count, verdict in ((10, Verdict.NO_VERDICT), (11, Verdict.PASS)):
        judged = judge_objective(of_requests([request(number, 100) for number in range(count)]), objective)
        assert judged.verdict is verdict
        beside = [request(number, 100, itl=None) for number in range(count, 2 * count)]  # each came in one piece
        assert judge_objective(of_requests([request(number, 100) for number in range(count)] + beside), objective) == (
            judged
        )


def test_a_bound_within_the_spread_of_the_trials_is_marked() -> None:
    near = judge_objective(of_trials("time_to_first_token", [480, 495, 510]), TTFT_P99)
    far = judge_objective(of_trials("time_to_first_token", [280, 295, 310]), TTFT_P99)
    alone = judge_objective(of_trials("time_to_first_token", [495]), TTFT_P99)
    assert near.verdict is far.verdict is alone.verdict is Verdict.PASS
    assert near.is_near and "within the spread" in near.reason
    assert far.interval and not far.is_near
    assert alone.interval is None and not alone.is_near


def test_what_has_no_figure_never_passes() -> None:
    ok = [request(number, 100) for number in range(700)]
    dead = CellSample("agg-c8", 2, None, (None,), failure="aiperf timed out")
    half = CellSample("agg-c8", 2, of_requests(ok).figures, (of_requests(ok).figures, None))
    failed = of_requests([request(number, None) for number in range(5)])
    unused = of_requests([])
    uncounted = of_requests([request(number, 100, osl=None) for number in range(700)])
    invalid = of_requests(ok, validity=ValidityLevel.INVALID, doubts=("a foreign process used GPU 0",))
    itl = parse_objective("inter_token_latency:avg:le:50")
    errors = parse_objective("request_error_rate:avg:le:5")
    for sample, objective, verdict, says in (
        (dead, TTFT_P99, Verdict.FAILED, "no result (aiperf timed out)"),
        (half, TTFT_P99, Verdict.FAILED, "trial 2 of 2 has no result"),
        (failed, TTFT_P99, Verdict.FAILED, "all 5 requests failed"),
        (failed, errors, Verdict.MISSED, "100 %, expected at most 5 %"),
        (unused, TTFT_P99, Verdict.NO_VERDICT, "no request was measured"),
        (unused, errors, Verdict.NO_VERDICT, "no request was measured"),
        (uncounted, itl, Verdict.NO_VERDICT, "700 answers carry no usage"),
        (invalid, TTFT_P99, Verdict.NO_VERDICT, "INVALID: a foreign process used GPU 0"),
    ):
        judged = judge_objective(sample, objective)
        assert judged.verdict is verdict and says in judged.reason, (says, judged)


def test_a_suspect_cell_is_judged_and_marked() -> None:
    trial = [request(number, 100) for number in range(700)]
    judged = judge_objective(of_requests(trial, validity=ValidityLevel.SUSPECT, doubts=("not steady",)), TTFT_P99)
    assert (judged.verdict, judged.doubts) == (Verdict.PASS, ("not steady",))
    assert judge_objective(of_requests(trial, validity=ValidityLevel.SUSPECT), TTFT_P99).doubts == (
        "the cell is SUSPECT",
    )
    assert judge_objective(of_requests(trial), TTFT_P99).doubts == ()


@pytest.mark.parametrize(
    ("limit", "verdict"), [("0%", Verdict.MISSED), ("24.9%", Verdict.MISSED), ("25%", Verdict.PASS)]
)
def test_failed_requests_are_held_against_the_most_that_there_may_be(limit: str, verdict: Verdict) -> None:
    sample = of_requests([request(0, None), *(request(number, 100) for number in (1, 2, 3))])
    judged = judge_error_rate(sample, parse_percent("--max-error-rate", limit))
    assert (judged.verdict, judged.value) == (verdict, 25)
    assert judge_error_rate(of_requests([])).verdict is Verdict.NO_VERDICT
    assert judge_error_rate(replace(sample, validity=ValidityLevel.INVALID)).verdict is judge_error_rate(sample).verdict


@pytest.mark.parametrize("typed", ["5", "0.05", "-1%", "101%", "five%", "nan%", "%", "", "5 % of it"])
def test_a_percentage_has_its_sign(typed: str) -> None:
    with pytest.raises(UsageError, match="expected a percentage from 0% to 100% with the percent sign"):
        parse_percent("--max-error-rate", typed)


def test_goodput_is_of_requests_that_meet_every_latency() -> None:
    objectives = [parse_objective(f"{metric}:p99:le:{most}") for metric, most in
                  (("time_to_first_token", 200), ("inter_token_latency", 20))]  # fmt: skip
    bounds = request_bounds(objectives)
    trial = [
        request(0, 200, itl=20),  # good, by a hair
        request(1, 201, itl=10),
        request(2, 100, itl=21),
        request(3, None),
        request(4, 100, itl=None),  # one token: aiperf has no ITL of it, and takes it for no good one
        request(7, 100),  # after a second in which nothing ran
    ]
    assert goodput(trial, bounds) == pytest.approx(2 / 8)
    assert goodput([request(0, None)], bounds) == 0
    assert goodput([], bounds) is None
    assert goodput(trial, request_bounds(objectives[:1])) == pytest.approx(4 / 8)


def test_goodput_is_not_known_where_nobody_counted_the_tokens_of_a_request_that_may_be_good() -> None:
    bounds = request_bounds(
        [parse_objective("time_to_first_token:p99:le:200"), parse_objective("inter_token_latency:p99:le:20")]
    )
    uncounted = replace(request(0, 100, itl=None), output_sequence_length=None)
    late = replace(request(0, 300, itl=None), output_sequence_length=None)
    assert goodput([request(0, 100), uncounted], bounds) is None
    assert goodput([request(0, 100), uncounted], bounds, Span(0, 10**9)) is None
    assert goodput([late, replace(uncounted, error="HTTP 500")], bounds) == 0  # whatever they were worth
    assert goodput([uncounted], {figure: one for figure, one in bounds.items() if figure is time_to_first_token})
    sample = of_requests([uncounted])
    judged = judge_goodput(sample, [goodput([uncounted], bounds)], 1)
    assert judged.verdict is Verdict.NO_VERDICT and "1 answers carry no usage" in judged.reason


def test_the_widest_bound_of_a_latency_is_that_of_a_request() -> None:
    objectives = [parse_objective(f"request_latency:{which}") for which in ("p50:le:100", "p99:lt:500", "avg:le:200")]
    ((figure, bound),) = request_bounds([*objectives, parse_objective("output_token_throughput:avg:ge:5")]).items()
    assert isinstance(figure, Spread) and (bound.threshold, bound.operator) == (500, "lt")


@pytest.mark.parametrize("typed", [[], ["output_token_throughput:avg:ge:5"]])
def test_goodput_without_an_objective_of_a_latency_is_refused(typed: list[str]) -> None:
    with pytest.raises(
        UsageError, match="--min-goodput has no effect without the --slo of a latency.*; expected one, as --slo"
    ):
        request_bounds([parse_objective(text) for text in typed])


def test_goodput_is_judged_by_the_mean_of_all_trials() -> None:
    sample = of_requests([request(0, 100)], [request(0, 100)])
    assert judge_goodput(sample, [0.9, 1.1], 1).verdict is Verdict.PASS
    assert judge_goodput(sample, [0.9, 1.0], 1).verdict is Verdict.MISSED
    for unknown in ([1.5, None], [1.5], []):
        assert judge_goodput(sample, unknown, 1).verdict is Verdict.NO_VERDICT
    assert judge_goodput(CellSample("x", 1, None, ()), [], 1).verdict is Verdict.FAILED

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_samples import of_requests, of_trials, request

from trtx.bench import Cell, LoadSpec, Trial
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import CheckResult, Verdict, outcome
from trtx.bench.judge.regression import DEFAULT_METRICS, GateLimit, compare, parse_limit, parse_metrics
from trtx.bench.judge.resolution import check_resolvable
from trtx.bench.judge.sample import CellSample, MetricColumn
from trtx.bench.judge.slo import judge_objective, parse_objective
from trtx.bench.judge.validity import Reason, Validity
from trtx.bench.metric_types import Figures, all_figures
from trtx.errors import GateError, NoVerdictError, UsageError
from trtx.stats.intervals import Interval

pytestmark = pytest.mark.slow

THROUGHPUT, TTFT_P50, TTFT_P99 = parse_metrics(
    ["output_token_throughput", "time_to_first_token:p50", "time_to_first_token:p99"]
)
FIVE = GateLimit(5)


def _noisy(draw: random.Random, mean: float, spread: float, trials: int = 5) -> list[float]:
    return [mean * math.exp(draw.gauss(0, spread)) for _ in range(trials)]


def _verdicts(slower: float, spread: float, gates: int, metric: MetricColumn = TTFT_P50) -> Counter[Verdict]:
    """Of so many gates of 5 %, with 5 trials on each side; a throughput falls by what a latency rises."""
    draw, name = random.Random(7), metric.metric.name
    factor = 1 + slower if metric.metric.better == "lower" else 1 - slower
    found: Counter[Verdict] = Counter()
    for _ in range(gates):
        baseline, candidate = _noisy(draw, 100, spread), _noisy(draw, 100 * factor, spread)
        (judged,) = compare([of_trials(name, baseline)], [of_trials(name, candidate)], FIVE, [metric])
        found[judged.verdict] += 1
    return found


# t(8 degrees, 0.975) · s · √(2/5) = 0.7 %: what the spread is of which 5 trials a side give that half-width.
SPREAD = math.log(1.007) / (2.306 * math.sqrt(2 / 5))


@pytest.mark.parametrize("metric", [TTFT_P50, THROUGHPUT], ids=lambda metric: metric.name)
def test_a_known_slowdown_is_told_from_the_limit(metric: MetricColumn) -> None:
    """With a half-width of 0.7 %, 3 % passes a gate of 5 % and 10 % regresses, each time."""
    assert _verdicts(0.03, SPREAD, 100, metric) == {Verdict.PASS: 100}
    assert _verdicts(0.10, SPREAD, 100, metric) == {Verdict.REGRESSED: 100}
    assert _verdicts(-0.10, SPREAD, 100, metric) == {Verdict.PASS: 100}  # faster is no regression


@pytest.mark.parametrize("metric", [TTFT_P50, THROUGHPUT], ids=lambda metric: metric.name)
def test_one_build_twice_does_not_regress(metric: MetricColumn) -> None:
    assert _verdicts(0, SPREAD, 100, metric) == {Verdict.PASS: 100}
    assert _verdicts(0, 0.02, 500, metric)[Verdict.REGRESSED] == 0
    assert _verdicts(0, 0.10, 500, metric)[Verdict.REGRESSED] <= 0.025 * 500


def test_noise_gives_no_verdict_and_no_guess() -> None:
    """At the limit itself either answer is wrong; it is given at most in 2.5 % of the gates each."""
    for spread in (0.01, 0.2):
        found = _verdicts(0.05, spread, 1000)
        assert found[Verdict.REGRESSED] <= 40 and found[Verdict.PASS] <= 40, found
        assert found[Verdict.REGRESSED] >= 10 and found[Verdict.PASS] >= 10, found


@pytest.mark.slow
def test_many_cells_are_not_many_chances_of_a_false_alarm() -> None:
    draw = random.Random(3)
    gates, alarms = 200, 0
    for _ in range(gates):  # ten cells that are worse by just the limit: each alarm is a false one
        sides = [
            [of_trials("time_to_first_token", _noisy(draw, mean, 0.05), cell=f"c{cell}") for cell in range(10)]
            for mean in (100, 105)
        ]
        alarms += any(judged.verdict is Verdict.REGRESSED for judged in compare(*sides, FIVE, [TTFT_P50]))
    assert alarms / gates <= 0.05  # of intervals of 95 % each: 0.22


@given(
    st.floats(0.5, 2),
    st.floats(1, 1.3),
    st.floats(0.1, 99),
    st.sampled_from([TTFT_P50, THROUGHPUT, DEFAULT_METRICS[2]]),
)
def test_the_verdict_says_where_the_interval_lies(
    middle: float, reach: float, percent: float, metric: MetricColumn
) -> None:
    limit, ratio = GateLimit(percent), Interval(middle, middle / reach, middle * reach, 0.95)
    is_lower = metric.metric.better == "lower"
    worse = [(bound - 1 if is_lower else 1 - bound) * 100 for bound in (ratio.low, ratio.high)]  # in %
    verdict = limit.verdict(metric, ratio)
    if abs(min(worse) - percent) > 1e-9 and abs(max(worse) - percent) > 1e-9:
        assert (verdict is Verdict.REGRESSED) == (min(worse) > percent)
        assert (verdict is Verdict.PASS) == (max(worse) <= percent)


@given(st.integers(0, 10**6), st.floats(0.9, 1.2), st.floats(1, 1.2))
def test_a_slower_candidate_is_never_judged_better(seed: int, slower: float, still: float) -> None:
    draw, order = random.Random(seed), (Verdict.PASS, Verdict.NO_VERDICT, Verdict.REGRESSED)
    baseline, candidate = _noisy(draw, 100, 0.02), _noisy(draw, 100 * slower, 0.02)
    verdicts = [
        compare(
            [of_trials("time_to_first_token", baseline)],
            [of_trials("time_to_first_token", [factor * value for value in candidate])],
            FIVE,
            [TTFT_P50],
        )[0].verdict
        for factor in (1, still)
    ]
    assert order.index(verdicts[0]) <= order.index(verdicts[1])


def test_rounds_are_compared_in_pairs() -> None:
    rounds = [50.0, 100.0, 200.0, 70.0]
    slower = [1.1 * value * noise for value, noise in zip(rounds, (1.001, 0.999, 1.0, 1.002), strict=True)]
    sides = [of_trials("time_to_first_token", rounds)], [of_trials("time_to_first_token", slower)]
    (paired,) = compare(*sides, FIVE, [TTFT_P50], design="paired")
    (independent,) = compare(*sides, FIVE, [TTFT_P50])
    assert (paired.verdict, independent.verdict) == (Verdict.REGRESSED, Verdict.NO_VERDICT)
    (unequal,) = compare(sides[0], [of_trials("time_to_first_token", slower[:3])], FIVE, [TTFT_P50], design="paired")
    assert unequal.verdict is Verdict.NO_VERDICT and "4 rounds of the baseline and 3" in unequal.reason


def test_a_judgement_has_the_numbers_that_it_is_of() -> None:
    (judged,) = compare(
        [of_trials("output_token_throughput", [100, 101, 99])], [of_trials("output_token_throughput", [80, 81, 79])],
        FIVE, [THROUGHPUT],
    )  # fmt: skip
    assert judged.verdict is Verdict.REGRESSED
    assert judged.value == pytest.approx(0.8, abs=1e-3) and judged.limit == 0.95
    assert judged.interval and judged.interval.low < judged.value < judged.interval.high < 0.95
    for number in (judged.value, judged.interval.low, judged.interval.high):
        assert f"{number:.4f}" in judged.reason


def test_what_cannot_be_compared_never_passes() -> None:
    ttft = "time_to_first_token"
    good = of_trials(ttft, [100, 101, 99])
    trials = [[request(number, 100 + number % 3) for number in range(20)] for _ in range(3)]
    whole = of_requests(*trials)
    dead = CellSample("agg-c8", 2, None, (None,), failure="aiperf timed out")
    half = CellSample("agg-c8", 2, whole.figures, (*whole.trials[:2], None))
    failing = of_requests(*trials[:2], [*trials[2][:-1], request(19, None)])
    none = of_requests(*trials[:2], [request(number, 100, osl=None) for number in range(20)])
    invalid = of_trials(ttft, [100, 101, 99], validity=ValidityLevel.INVALID, doubts=("GPU 0 was throttled",))
    for baseline, candidate, metric, verdict, says in (
        (good, dead, TTFT_P50, Verdict.FAILED, "no result (aiperf timed out)"),
        (good, half, TTFT_P50, Verdict.FAILED, "trial 3 of 3 has no result"),
        (good, failing, TTFT_P50, Verdict.FAILED, "1.67 % of the requests failed; expected at most 0 %"),
        (whole, none, THROUGHPUT, Verdict.FAILED, "1 of 3 trials lack it"),
        (good, invalid, TTFT_P50, Verdict.NO_VERDICT, "INVALID: GPU 0 was throttled"),
        (invalid, good, TTFT_P50, Verdict.NO_VERDICT, "baseline: the cell is INVALID"),
        (dead, good, TTFT_P50, Verdict.NO_VERDICT, "baseline: the cell has no result"),
        (failing, good, TTFT_P50, Verdict.NO_VERDICT, "baseline: 1.67 % of the requests failed"),
        (good, of_trials(ttft, [100]), TTFT_P50, Verdict.NO_VERDICT, "3 and 1 trials give no interval"),
        (of_trials(ttft, [100]), good, TTFT_P50, Verdict.NO_VERDICT, "1 and 3 trials give no interval"),
        (good, of_trials(ttft, [1, 2], count=661), TTFT_P99, Verdict.NO_VERDICT, "it needs 662 requests in each trial"),
        (good, of_trials(ttft, [1, 0]), TTFT_P50, Verdict.NO_VERDICT, "so there is no ratio"),
        (of_trials(ttft, [1, 2], cell="agg-c1"), good, TTFT_P50, Verdict.NO_VERDICT, "the baseline has no such cell"),
    ):
        (judged,) = compare([baseline], [candidate], FIVE, [metric])
        assert judged.verdict is verdict and says in judged.reason, (says, judged)
        assert judged.interval is None and outcome([judged]) is not None


def test_the_trial_with_the_fewest_requests_says_whether_a_percentile_is_one() -> None:
    trials = [[request(number, 100) for number in range(count)] for count in (30, 10)]
    (judged,) = compare([of_requests(*trials)], [of_requests(*trials)], FIVE, [TTFT_P50])
    assert judged.verdict is Verdict.NO_VERDICT and "needs 11 requests in each trial, but one has 10" in judged.reason


def test_failed_requests_within_what_there_may_be_are_compared() -> None:
    trial = [request(number, None if number == 0 else 100) for number in range(100)]
    sample = of_requests(trial, trial)
    (judged,) = compare([sample], [sample], FIVE, [TTFT_P50], max_error_rate=1.0)
    assert judged.verdict is Verdict.PASS


def test_a_suspect_cell_is_compared_and_marked_on_either_side() -> None:
    suspect = of_trials("time_to_first_token", [100, 100.1], validity=ValidityLevel.SUSPECT, doubts=("not steady",))
    (judged,) = compare([suspect], [suspect], FIVE, [TTFT_P50])
    assert (judged.verdict, judged.doubts) == (Verdict.PASS, ("not steady", "baseline: not steady"))


def test_each_cell_is_compared_with_its_own_in_each_metric() -> None:
    def run(slow: float) -> list[CellSample]:
        trials = lambda ttft: [[request(n, ttft + n % 3 + trial / 9) for n in range(20)] for trial in range(3)]  # noqa: E731
        return [of_requests(*trials(100), cell="agg-c1"), of_requests(*trials(200 * slow), cell="agg-c8")]

    judged = compare(run(1), run(2), FIVE)
    assert [(one.cell, one.criterion) for one in judged] == [
        (cell, metric.name) for cell in ("agg-c1", "agg-c8") for metric in DEFAULT_METRICS
    ]
    regressed = [(one.cell, one.criterion) for one in judged if one.verdict is not Verdict.PASS]
    assert regressed == [("agg-c8", "time_to_first_token:p50")]
    backwards = compare(run(1)[::-1], run(2), FIVE)
    assert backwards == judged


def _judged(*verdicts: Verdict) -> list[CheckResult]:
    return [
        CheckResult(cell=f"c{place}", criterion="x", verdict=one, reason="why") for place, one in enumerate(verdicts)
    ]


@given(st.lists(st.sampled_from(Verdict), max_size=6))
def test_bad_news_outweighs_no_news_which_outweighs_good_news(verdicts: list[Verdict]) -> None:
    error = outcome(_judged(*verdicts))
    bad = {Verdict.FAILED, Verdict.MISSED, Verdict.REGRESSED}
    if bad & set(verdicts):
        assert isinstance(error, GateError)
    elif Verdict.NO_VERDICT in verdicts or not verdicts:
        assert isinstance(error, NoVerdictError)
    else:
        assert error is None


def test_the_error_tells_the_worst_first_and_not_all() -> None:
    judged = _judged(Verdict.PASS, *[Verdict.REGRESSED] * 4, Verdict.NO_VERDICT, Verdict.FAILED)
    error = outcome([replace(one, reason=f"why {place}") for place, one in enumerate(judged)])
    assert str(error) == (
        "6 of 7 checks did not pass: c6 x failed: why 6; c1 x regressed: why 1; c2 x regressed: why 2; and 3 more"
    )


def test_a_reason_that_several_share_is_told_once() -> None:
    error = outcome(_judged(Verdict.PASS, *[Verdict.REGRESSED] * 4, Verdict.NO_VERDICT, Verdict.FAILED))
    assert str(error) == (
        "6 of 7 checks did not pass: c6 x failed: why; c1, c2, c3, c4 x regressed: why; c5 x no verdict: why"
    )
    many = outcome(_judged(*[Verdict.NO_VERDICT] * 9))
    assert str(many) == "9 of 9 checks did not pass: c0, c1, c2, c3, c4, c5 and 3 more x no verdict: why"


def test_criteria_of_the_same_cells_are_told_together() -> None:
    one, two = _judged(Verdict.NO_VERDICT, Verdict.NO_VERDICT)
    of_both = [replace(each, criterion=criterion) for criterion in ("x", "y") for each in (one, two)]
    assert str(outcome(of_both)) == "4 of 4 checks did not pass: c0, c1 x, y no verdict: why"
    assert str(outcome([*of_both, replace(one, criterion="z")])) == (
        "5 of 5 checks did not pass: c0, c1 x, y and c0 z no verdict: why"
    )


@pytest.mark.parametrize("typed", ["0%", "100%", "5", "-5%", "x%", ""])
def test_a_limit_is_a_percentage_that_can_be_resolved(typed: str) -> None:
    with pytest.raises(UsageError, match=f"--max-regression {typed}: expected"):
        parse_limit(typed)
    assert parse_limit("2.5%") == GateLimit(2.5)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["time_to_first_token"], "is a distribution; name one of its statistics, such as time_to_first_token:p50"),
        (["output_sequence_length"], "neither a high nor a low value is better"),
        (["request_error_rate"], "use --max-error-rate"),
        (["error_request_count"], "use --max-error-rate"),
        (["time_to_first_token:p50"] * 2, "time_to_first_token:p50 is listed twice"),
        (["throughput"], "no metric is called 'throughput'; did you mean"),
    ],
)
def test_what_cannot_regress_is_one_sentence(typed: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_metrics(typed)
    assert str(refused.value).startswith("--metrics") and says in str(refused.value)


def test_the_metrics_that_can_be_compared_are_all_but_counts_and_lengths() -> None:
    cannot = set()
    for one in all_figures():
        try:
            parse_metrics([MetricColumn(one, one.columns[0]).name if one.columns else one.name])
        except UsageError:
            cannot.add(one.name)
    assert cannot == {
        "request_count", "error_request_count", "uncounted_request_count", "request_error_rate", "benchmark_duration",
        "input_sequence_length", "output_sequence_length", "input_sequence_lengths", "output_sequence_lengths",
        "format_request_rate", "tools_request_rate", "cut_answer_rate", "draft_overhead",
    }, (
        "a metric that describes the load can't get better: add it to this list. For any other metric set better= in "
        "its record in trtx/bench/metrics.py"
    )  # fmt: skip


def test_a_cell_as_it_was_measured_is_a_sample() -> None:
    trials = [[request(number, 100 * trial) for number in range(12)] for trial in (1, 2)]
    measured = tuple(
        Trial(number, "ok", f"trial-{number:02d}", Figures.over([trial]), None, (), None)
        for number, trial in enumerate(trials, 1)
    )
    (load,) = LoadSpec(concurrency=(8,)).loads
    validity = Validity(ValidityLevel.SUSPECT, (Reason("steady", ValidityLevel.SUSPECT, "not steady"),), ())
    cell = Cell("agg", load, "gpu", 2, len(trials), measured, Figures.over(trials), None, validity)
    sample = CellSample.of(cell)
    assert (sample.cell, sample.validity, sample.doubts) == ("agg-c8", ValidityLevel.SUSPECT, ("not steady",))
    assert sample.values(TTFT_P50) == (100, 200)
    assert sample.value(TTFT_P50) == 150
    (per_gpu,) = parse_metrics(["output_token_throughput_per_gpu"])
    assert sample.values(per_gpu) == (50, 50)
    assert sample.supports(TTFT_P50) and not sample.supports(TTFT_P99)


@given(st.lists(st.floats(90, 110), min_size=2, max_size=6), st.integers(2, 10), st.floats(0.5, 20))
def test_what_is_resolvable_is_what_an_equal_candidate_can_pass(
    values: list[float], trials: int, percent: float
) -> None:
    baseline, limit = of_trials("time_to_first_token", values), GateLimit(percent)
    try:
        check_resolvable([baseline], ["agg-c8"], len(values), limit, [TTFT_P50])
        is_resolvable = True
    except UsageError as error:
        assert "can't be resolved" in str(error)
        is_resolvable = False
    (judged,) = compare([baseline], [baseline], limit, [TTFT_P50])
    assert judged.interval is not None
    if abs(judged.interval.high - limit.ratio(TTFT_P50)) > 1e-9:
        assert is_resolvable == (judged.verdict is Verdict.PASS)


def test_a_limit_below_the_spread_is_refused_with_what_would_do() -> None:
    draw = random.Random(1)
    baseline = [of_trials("time_to_first_token", _noisy(draw, 100, 0.05), count=200)]
    check_resolvable(baseline, ["agg-c8"], 5, GateLimit(20), [TTFT_P50])
    with pytest.raises(UsageError, match="can't be resolved: time_to_first_token:p50 of agg-c8 varies by") as refused:
        check_resolvable(baseline, ["agg-c8"], 5, GateLimit(2), [TTFT_P50])
    said = str(refused.value)
    needed = int(said.partition("take ")[2].partition(" trials")[0])
    assert f"take {needed} trials of 200 requests ({needed * 200:,} in all) on each side" in said
    # With so many, and the spread that was seen, four of five gates of an equal build pass.
    gates, passed = 100, 0
    spread = statistics.stdev(math.log(value) for value in baseline[0].values(TTFT_P50) if value)
    for _ in range(gates):
        sides = [[of_trials("time_to_first_token", _noisy(draw, 100, spread, needed))] for _ in "ab"]
        passed += compare(*sides, GateLimit(2), [TTFT_P50])[0].verdict is Verdict.PASS
    assert 0.7 <= passed / gates <= 0.9


@pytest.mark.parametrize(
    ("baseline", "trials", "says"),
    [
        (of_trials("time_to_first_token", [100, 101], cell="agg-c1"), 5, "has no cell agg-c8; .* it has only agg-c1"),
        (of_trials("time_to_first_token", [100]), 5, "the baseline has one trial of agg-c8"),
        (of_trials("time_to_first_token", [100, 101]), 1, "the candidate would have one trial of agg-c8"),
        (
            of_trials("request_latency", [100, 101]),
            5,
            "time_to_first_token:p50 can't be compared with the baseline's agg-c8: 2 of 2",
        ),
        (
            of_trials("time_to_first_token", [1, 1e9]),
            5,
            "no affordable number of trials would be enough, or raise the limit",
        ),
        (CellSample("agg-c8", 1, None, (None,)), 5, "the cell has no result"),
    ],
)
def test_a_baseline_that_nothing_can_be_held_against_is_refused_beforehand(
    baseline: CellSample, trials: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        check_resolvable([baseline], ["agg-c8"], trials, FIVE, [TTFT_P50])


def test_more_cells_and_metrics_ask_for_more() -> None:
    cells = [of_trials("time_to_first_token", [100, 103, 97, 101, 99], cell=f"c{number}") for number in range(10)]
    check_resolvable(cells, ["c0"], 5, FIVE, [TTFT_P50])
    with pytest.raises(UsageError, match="can't be resolved.* below 1.06 .* take 8 trials"):
        check_resolvable(cells, [sample.cell for sample in cells], 5, FIVE, [TTFT_P50])
    with pytest.raises(UsageError, match="can't be resolved.* below 1.09 .* take 5 trials"):
        check_resolvable(cells, ["c0"], 2, FIVE, [TTFT_P50])


def test_a_figure_per_device_is_of_the_devices_that_were_asked_for() -> None:
    per_gpu, per_device = parse_metrics(["output_token_throughput_per_gpu", "output_token_throughput_per_device"])
    of_gpus, of_workers = (
        replace(of_trials("output_token_throughput", [100.0] * 5), device=device) for device in ("gpu", "worker")
    )
    assert (per_gpu.name, per_gpu.unit) == ("output_token_throughput_per_gpu:avg", "tokens/s/GPU")
    assert parse_metrics([per_gpu.name]) == (per_gpu,)
    assert [found.verdict for found in compare([of_gpus], [of_gpus], FIVE, [per_gpu, per_device])] == [Verdict.PASS] * 2
    (over_workers,) = compare([of_gpus], [of_workers], FIVE, [per_gpu])
    assert over_workers.verdict is Verdict.FAILED
    assert over_workers.reason == (
        "it is per GPU, but the topology's number of GPUs is not known; use output_token_throughput_per_worker"
    )
    (no_measure,) = compare([of_gpus], [of_workers], FIVE, [per_device])
    assert no_measure.verdict is Verdict.NO_VERDICT and "per GPU and the other per worker" in no_measure.reason


def test_an_objective_per_gpu_is_no_verdict_where_no_gpu_is_known() -> None:
    sample = replace(of_trials("output_token_throughput", [100.0]), device="worker")
    asked = "output_token_throughput_per_gpu:avg:ge:10"
    judged = judge_objective(sample, parse_objective(asked))
    assert (judged.criterion, judged.verdict) == (asked, Verdict.NO_VERDICT)
    on_gpus = judge_objective(replace(sample, device="gpu"), parse_objective(asked))
    assert (on_gpus.verdict, on_gpus.unit) == (Verdict.PASS, "tokens/s/GPU")

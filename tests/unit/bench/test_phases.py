"""Windows found in simulated loads, against what the simulation knows."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from examples import examples, first_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.bench.simulated_load import MS, Request, Simulated, closed_loop, drawn, open_loop
from trtx.bench.metric_types import Distribution, Figures, ValueRange, all_figures
from trtx.bench.metrics import (
    benchmark_duration,
    error_request_count,
    output_token_throughput,
    output_token_throughput_per_device,
    request_count,
    request_throughput,
    time_to_first_token,
)
from trtx.bench.phases import (
    HELD_SHARE,
    NoSteadyPart,
    Phases,
    Span,
    closed_loop_phases,
    open_loop_phases,
    output_tokens_in,
    requests_in,
    sent_in,
)
from trtx.bench.records import RequestRecord

pytestmark = pytest.mark.slow

lengths = st.one_of(st.integers(1, 60), st.integers(500, 2000))  # a long tail
served = st.builds(
    Request,
    prefill_ms=st.floats(1, 200),
    itl_ms=st.one_of(st.just(0.0), st.floats(0.01, 20)),  # 0: all tokens in one piece
    tokens=lengths,
    fails_after_ms=st.one_of(st.none(), st.none(), st.none(), st.floats(0, 500)),
)
loads = st.tuples(st.integers(1, 8), st.lists(served, min_size=1, max_size=60))


@st.composite
def long_loads(draw: st.DrawFn) -> tuple[int, list[Request]]:
    """Slots, and at least five rounds of requests for them, of which some succeed."""
    slots = draw(st.integers(1, 8))
    kinds = [replace(draw(served), fails_after_ms=None), *draw(st.lists(served, max_size=8))]
    rng = draw(st.randoms(use_true_random=False))
    return slots, rng.choices(kinds, k=slots * draw(st.integers(5, 12)))


def _phases(simulated: Simulated, slots: int) -> Phases:
    found = closed_loop_phases(simulated.records, slots)
    assert isinstance(found, Phases), found
    return found


@settings(deadline=None, max_examples=examples(60))
@given(long_loads(), st.booleans(), st.floats(0, 50))
def test_a_closed_loops_steady_part_has_only_times_at_full_concurrency(
    load: tuple[int, list[Request]], serial: bool, stagger_ms: float
) -> None:
    slots, requests = load
    simulated = closed_loop(requests, slots, stagger_ms=stagger_ms, serial_prefill=serial)
    found = closed_loop_phases(simulated.records, slots)
    assume(isinstance(found, Phases))
    assert isinstance(found, Phases)
    steady = found.steady
    for at_ns in (steady.start_ns, *(at for at in simulated.edges() if steady.has(at))):
        assert simulated.in_flight(at_ns) == slots
    assert found.mean_in_flight == pytest.approx(slots)


@settings(deadline=None, max_examples=examples(60))
@given(loads, st.floats(0, 100), st.randoms())
def test_the_three_parts_cover_a_trial_whatever_the_order_of_its_records(
    load: tuple[int, list[Request]], gap_ms: float, rng: random.Random
) -> None:
    slots, requests = load
    records = closed_loop(requests, slots, gap_ms=gap_ms).records
    found = closed_loop_phases(records, slots)
    shuffled = rng.sample(records, len(records))
    assert closed_loop_phases(shuffled, slots) == found
    if isinstance(found, Phases):
        ramp, steady, drain = found.ramp, found.steady, found.drain
        assert ramp.start_ns == min(record.start_ns for record in records)
        assert ramp.end_ns == steady.start_ns < steady.end_ns == drain.start_ns
        assert drain.end_ns == max(record.end_ns for record in records)
        assert found.sent_count == len(sent_in(records, steady)) >= slots
        assert HELD_SHARE * slots <= found.mean_in_flight <= slots
    else:
        assert found.reason


@settings(deadline=None, max_examples=examples(60))
@given(long_loads())
def test_a_closed_loop_of_five_rounds_without_failures_has_a_steady_part(load: tuple[int, list[Request]]) -> None:
    slots, requests = load
    records = closed_loop([replace(request, fails_after_ms=None) for request in requests], slots).records
    found = closed_loop_phases(records, slots)
    assert isinstance(found, Phases)
    # Not the wave that starts at once, and at most two rounds more.
    assert len(records) - 3 * slots < found.sent_count < len(records) - slots


@settings(deadline=None, max_examples=examples(60))
@given(long_loads(), st.booleans())
def test_tokens_in_the_steady_part_are_those_that_came_in_it(load: tuple[int, list[Request]], serial: bool) -> None:
    slots, requests = load
    simulated = closed_loop(requests, slots, serial_prefill=serial)
    found = closed_loop_phases(simulated.records, slots)
    assume(isinstance(found, Phases))
    assert isinstance(found, Phases)
    steady = found.steady
    token_ns = simulated.token_ns()
    came = sum(steady.has(at_ns) for times in token_ns for at_ns in times)
    counted = sum(output_tokens_in(record, steady) for record in simulated.records if record.succeeded)
    # Tokens come at a steady pace here, so each request that crosses an edge is off by a token at most. Where all come
    # at once (ITL 0), at the very edge, they are all within or none.
    crossing = sum(
        record.start_ns <= edge <= record.end_ns
        for record in simulated.records
        for edge in (steady.start_ns, steady.end_ns)
    )
    at_once = sum(
        len(times)
        for times in token_ns
        if times and times[0] == times[-1] and times[0] in (steady.start_ns, steady.end_ns)
    )
    assert abs(counted - came) <= crossing + at_once + 1e-6
    rate = Figures.over([simulated.records], [steady])[output_token_throughput]
    assert (rate or 0) == pytest.approx(counted / steady.duration_s)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(served, min_size=1, max_size=30), st.integers(0, 10**10), st.booleans())
def test_spans_that_meet_have_all_tokens_and_requests_together(
    requests: list[Request], edge_ns: int, streamed: bool
) -> None:
    records = [record for record in closed_loop(requests, 3).records if record.succeeded]
    if not streamed:
        records = [replace(record, time_to_first_token=None) for record in records]
    before, after = Span(-1, edge_ns), Span(edge_ns, 10**14)
    for record in records:
        parts = [output_tokens_in(record, span) for span in (before, after)]
        assert sum(parts) == pytest.approx(record.output_sequence_length)
        assert requests_in(record, before) + requests_in(record, after) == pytest.approx(1)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.lists(served, min_size=1, max_size=20), min_size=1, max_size=3))
def test_over_a_span_that_holds_a_whole_trial_each_figure_is_the_trials(trials: list[list[Request]]) -> None:
    records = [closed_loop(requests, 3).records for requests in trials]
    # A nanosecond more at the end, as a span's end is not in it.
    spans = [
        Span(min(record.start_ns for record in trial), max(record.end_ns for record in trial) + 1) for trial in records
    ]
    whole, spanned = Figures.over(records), Figures.over(records, spans)
    for figure in all_figures():
        expected, found = figure.read(whole, 2), figure.read(spanned, 2)
        if isinstance(expected, Distribution | ValueRange):
            assert found == expected
        elif (benchmark_duration.read(whole, 1) or 0) > 1e-5:  # of a shorter one that nanosecond is too much
            assert (found is None and expected is None) or found == pytest.approx(expected, rel=1e-3), figure.name


def test_figures_over_a_span_by_hand() -> None:
    # 11 tokens each: one at 100 ms, ten in the second after. The span takes the first's last 500 ms, and of the second,
    # sent in it, all but its last 250 ms.
    first = RequestRecord(0, 1100 * MS, None, 100, 100, 1100, 64, 11)
    second = RequestRecord(700 * MS, 1800 * MS, None, 100, 100, 1100, 64, 11)
    failed = RequestRecord(900 * MS, 1000 * MS, "HTTP 500", *[None] * 5)
    found = Figures.over([[first, second, failed]], [Span(600 * MS, 1550 * MS)])
    assert found[benchmark_duration] == pytest.approx(0.95)
    assert found[output_token_throughput] == pytest.approx((5 + 1 + 7.5) / 0.95)
    assert output_token_throughput_per_device.read(found, 2) == pytest.approx((5 + 1 + 7.5) / 0.95 / 2)
    assert found[request_throughput] == pytest.approx((500 / 1100 + 850 / 1100) / 0.95)
    assert (found[request_count], found[error_request_count]) == (1, 1)
    spread = found[time_to_first_token]
    assert spread is not None and spread.count == 1


def test_rates_over_spans_are_a_mean_over_trials_and_none_where_one_has_none() -> None:
    trial = [RequestRecord(0, 1000 * MS, None, 0, 100, 1000, 64, 11)]
    bare = [replace(trial[0], output_sequence_length=None, inter_token_latency=None)]
    spans = [Span(0, 500 * MS), Span(0, 1000 * MS)]
    assert Figures.over([trial, trial], spans)[output_token_throughput] == pytest.approx((6 / 0.5 + 11 / 1) / 2)
    assert Figures.over([trial, bare], spans)[output_token_throughput] is None
    assert Figures.over([trial, trial], [Span(0, 500 * MS), Span(2000 * MS, 3000 * MS)])[request_throughput] is None
    with pytest.raises(ValueError, match="shorter"):
        Figures.over([trial, trial], spans[:1])


@pytest.mark.parametrize(("tail", "rounds", "bound"), first_of(2, [(0, 4, 0.04), (0, 8, 0.03), (0.02, 80, 0.03)]))
def test_steady_throughput_is_true_where_the_whole_trials_is_not(tail: float, rounds: int, bound: float) -> None:
    """2 % that are twenty times as long as the others take a run that is many times as long as they are."""
    steady, whole = [], []
    for seed in range(40):
        simulated = closed_loop(drawn(random.Random(seed), 16 * rounds, prefill_ms=150, tail=tail), 16)
        span = _phases(simulated, 16).steady
        steady.append(Figures.over([simulated.records], [span])[output_token_throughput])
        whole.append(Figures.over([simulated.records])[output_token_throughput])
    tokens = fmean(request.tokens for request in drawn(random.Random(0), 20_000, tail=tail))
    true = 16 * tokens / ((150 + 5 * (tokens - 1)) / 1000)  # renewal reward: tokens of a request over its time
    steady_off, whole_off = (fmean(rate or 0 for rate in rates) / true - 1 for rates in (steady, whole))
    assert abs(steady_off) < bound
    assert whole_off < -3 * bound


def test_the_wave_that_starts_at_once_is_not_in_steady_latencies() -> None:
    # 16 prompts that queue for one prefill: the first wave's TTFT is up to 16 prompts long. Later they come apart.
    def ttft(count: int, seed: int, span: Span | None) -> float:
        simulated = closed_loop(drawn(random.Random(seed), count, prefill_ms=20, tokens=200), 16, serial_prefill=True)
        found = Figures.over([simulated.records], [span or _phases(simulated, 16).steady])[time_to_first_token]
        assert found is not None
        return found.avg

    everything = Span(0, 10**15)
    true = fmean(ttft(4000, seed, None) for seed in range(3))
    short = range(100, 140)
    assert fmean(ttft(128, seed, None) for seed in short) == pytest.approx(true, rel=0.10)
    assert fmean(ttft(128, seed, everything) for seed in short) > 1.3 * true


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(2, 200), st.floats(5, 500))
def test_an_open_loops_steady_part_lies_between_its_first_answers_and_its_last_request(
    seed: int, count: int, apart_ms: float
) -> None:
    rng = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(1 / apart_ms)
        arrivals.append(at)
    simulated = open_loop(drawn(rng, count, tail=0.02), arrivals)
    found = open_loop_phases(simulated.records)
    if isinstance(found, NoSteadyPart):
        assert arrivals[-1] - arrivals[0] < 2000 * 20
        return
    assert found.steady.end_ns == simulated.records[-1].start_ns
    early = [record for record in simulated.records if record.start_ns < found.steady.start_ns]
    took = sorted(record.end_ns - record.start_ns for record in simulated.records)
    assert found.ramp.end_ns - found.ramp.start_ns >= took[(len(took) - 1) * 9 // 10]
    assert found.ramp.end_ns - found.ramp.start_ns <= found.steady.end_ns - found.steady.start_ns
    assert len(early) + found.sent_count < count


def test_an_open_loops_steady_throughput_is_the_rate_that_was_asked() -> None:
    rates = []
    for seed in range(40):
        rng = random.Random(seed)
        arrivals = [20.0 * i for i in range(200)]
        simulated = open_loop(drawn(rng, 200), arrivals)
        found = open_loop_phases(simulated.records)
        assert isinstance(found, Phases)
        rates.append(Figures.over([simulated.records], [found.steady])[request_throughput] or 0)
    assert fmean(rates) == pytest.approx(50, rel=0.02)


def test_a_server_that_falls_far_behind_its_rate_has_no_steady_part() -> None:
    simulated = open_loop(drawn(random.Random(1), 200), [20.0 * i for i in range(200)], serial_prefill=True)
    found = open_loop_phases(simulated.records)
    assert isinstance(found, NoSteadyPart)
    assert "requests were sent for 3.98 s, but nine of ten took up to" in found.reason


ONE = Request(100, 5, 10)
FAILS = Request(100, 5, 10, fails_after_ms=100)


@pytest.mark.parametrize(
    ("requests", "slots", "reason"),
    [
        ([], 4, "there is no request"),
        ([ONE], 1, "0 requests were sent between the end of the first round and the last request, but 1 are needed"),
        ([ONE] * 3, 8, "never more than 3 of 8 requests were in flight at a time"),
        ([FAILS] * 64, 4, "no request succeeded"),
        (
            [ONE] * 11,
            4,
            "3 requests were sent between the end of the first round and the last request, but 4 are needed",
        ),
    ],
)
def test_why_a_closed_loop_has_no_steady_part(requests: list[Request], slots: int, reason: str) -> None:
    # Each ends by itself, so that no two are sent at the same time.
    spread = [replace(request, prefill_ms=100 + i, fails_after_ms=None if request is ONE else 50 + i)
              for i, request in enumerate(requests)]  # fmt: skip
    found = closed_loop_phases(closed_loop(spread, slots).records, slots)
    assert isinstance(found, NoSteadyPart)
    assert found.reason == reason


def test_requests_that_fail_at_once_are_no_round() -> None:
    simulated = closed_loop([ONE, *[replace(FAILS, fails_after_ms=1)] * 30, *[ONE] * 20], 2)
    answered = sorted(record.end_ns for record in simulated.records if record.succeeded)
    assert _phases(simulated, 2).steady.start_ns == answered[1]


def test_a_client_that_leaves_slots_empty_has_no_steady_part_and_says_how_many_were_used() -> None:
    found = closed_loop_phases(closed_loop([ONE] * 40, 4, gap_ms=145, stagger_ms=10).records, 4)
    assert isinstance(found, NoSteadyPart)
    assert found.mean_in_flight == pytest.approx(2, rel=0.1)
    assert "of 4 requests were in flight" in found.reason


def test_why_an_open_loop_has_no_steady_part() -> None:
    assert open_loop_phases([]) == NoSteadyPart("there is no request")
    assert open_loop_phases(open_loop([FAILS], [0]).records) == NoSteadyPart("no request succeeded")
    found = open_loop_phases(open_loop([ONE], [0]).records)
    assert isinstance(found, NoSteadyPart) and found.remedy

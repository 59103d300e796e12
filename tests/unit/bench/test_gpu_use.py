"""GPU use, energy and cost of a part of a trial, from recorded readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.bench import gpu_metrics
from trtx.bench.gpu_use import GpuPart, PricedGpus, energy_in, gpu_use, reasons_over, represented
from trtx.bench.metric_types import Figures
from trtx.bench.phases import Span, input_tokens_in
from trtx.bench.readings import EDGE_NS, ForeignProcess, GpuReading, ServerReading
from trtx.bench.records import RequestRecord

SECOND = 10**9
SPAN = Span(10 * SECOND, 20 * SECOND)
TWO = PricedGpus(2, 3.6)


@st.composite
def _times(draw: st.DrawFn) -> list[int]:
    """Times of readings from before SPAN to after it, irregular but never further apart than what counts as read."""
    found = [draw(st.integers(SPAN.start_ns - EDGE_NS, SPAN.start_ns))]
    for gap_ns in draw(st.lists(st.integers(1, EDGE_NS), max_size=20)):
        found.append(found[-1] + gap_ns)
    while found[-1] < SPAN.end_ns:
        found.append(found[-1] + SECOND)
    return found


times = _times()
inner = st.integers(SPAN.start_ns, SPAN.end_ns)


def _counter(at: Sequence[int], steps: Sequence[float]) -> list[tuple[int, float]]:
    return [(at_ns, sum(steps[: place + 1])) for place, at_ns in enumerate(at)]


def _readings(seconds: Sequence[float], watts: Sequence[float] = (100.0, 300.0)) -> list[ServerReading]:
    """Two GPUs that draw these watts all the time; the second is busy three times as long as the first."""
    return [
        ServerReading(
            round(at * SECOND),
            tuple(
                GpuReading(
                    f"GPU {index}", power_w=drawn, memory_used_bytes=(index + 1) << 30, foreign=(),
                    utilization_percent=20.0 + 40 * index, energy_j=drawn * at, energy_at_ns=round(at * SECOND),
                )
                for index, drawn in enumerate(watts)
            ),
            None,
        )
        for at in seconds
    ]  # fmt: skip


def _with_gpu(reading: ServerReading, index: int, **changes: object) -> ServerReading:
    gpus = list(reading.gpus or ())
    gpus[index] = replace(gpus[index], **changes)  # type: ignore[arg-type]
    return replace(reading, gpus=tuple(gpus))


@given(times, st.floats(0, 1000))
def test_a_constant_power_gives_its_joules_however_irregular_the_readings(at: list[int], watts: float) -> None:
    found = energy_in([(at_ns, watts * (at_ns / SECOND)) for at_ns in at], SPAN)
    assert found == pytest.approx(watts * SPAN.duration_s, rel=1e-6, abs=1e-6)


@settings(max_examples=examples(100))
@given(times, st.data())
def test_joules_of_two_adjacent_parts_add_up_and_no_joule_is_invented(at: list[int], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.floats(0, 5000), min_size=len(at), max_size=len(at)))
    middle = data.draw(inner.filter(lambda at_ns: SPAN.start_ns < at_ns < SPAN.end_ns))
    counter = _counter(at, steps)
    whole = energy_in(counter, SPAN)
    parts = [energy_in(counter, span) for span in (replace(SPAN, end_ns=middle), replace(SPAN, start_ns=middle))]
    assert whole is not None and None not in parts
    assert sum(part or 0 for part in parts) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    around = [value for at_ns, value in counter if at_ns <= SPAN.start_ns][-1:]
    after = [value for at_ns, value in counter if at_ns >= SPAN.end_ns][:1]
    assert -1e-6 <= whole <= after[0] - around[0] + 1e-6


def test_a_small_increase_keeps_all_its_digits_however_high_the_counter_is() -> None:
    steps = [(9 * SECOND, 0.0), (12 * SECOND, 2.0**-16), (22 * SECOND, 2.0**-15)]
    low, high = (energy_in([(at_ns, start + joules) for at_ns, joules in steps], SPAN) for start in (0.0, 2.0**20))
    assert low == high == pytest.approx(2.0**-16 * (2 / 3 + 8 / 10), rel=1e-15)


@given(times, st.data())
def test_a_counter_that_was_reset_in_the_part_gives_no_joules(at: list[int], data: st.DataObject) -> None:
    first = max(place for place, at_ns in enumerate(at) if at_ns <= SPAN.start_ns)
    last = min(place for place, at_ns in enumerate(at) if at_ns >= SPAN.end_ns)
    reset = data.draw(st.integers(first + 1, last))
    counter = [(at_ns, float(place + 1 if place < reset else place - reset)) for place, at_ns in enumerate(at)]
    assert energy_in(counter, SPAN) is None


@given(times)
def test_each_moment_of_a_part_is_represented_by_one_reading(at: list[int]) -> None:
    weights = represented(at, SPAN)
    assert weights is not None
    assert sum(weight_ns for _, weight_ns in weights) == SPAN.end_ns - SPAN.start_ns
    assert all(at[place - 1] < SPAN.end_ns and at[place] > SPAN.start_ns for place, _ in weights)


@pytest.mark.parametrize(
    "seconds",
    [(), (8, 12, 15), (12, 15, 21), (6.9, 15, 21), (9, 15, 23.1)],
    ids=["none", "no end", "no start", "start too early", "end too late"],
)
def test_an_edge_without_a_reading_leaves_all_unknown(seconds: tuple[float, ...]) -> None:
    use = gpu_use(_readings(seconds), SPAN)
    assert (use.energy_j, use.utilization_percent, use.peak_power_w, use.peak_memory_bytes) == (None,) * 4
    assert len(use.reasons) == 1


def test_a_gap_keeps_the_joules_and_not_the_samples() -> None:
    use = gpu_use(_readings([9, 10, 11, 15, 16, 17, 18, 19, 20, 21]), SPAN)
    assert use.energy_j == pytest.approx(4000)
    assert (use.utilization_percent, use.peak_power_w, use.peak_power_of_one_w) == (None,) * 3
    assert use.reasons == ("readings are missing for more than 3 s",)


def test_two_gpus_are_summed_in_watts_and_averaged_in_use() -> None:
    readings = _readings([9.3, 11, 13.5, 15, 17.9, 20.4])
    readings[3] = _with_gpu(readings[3], 1, utilization_percent=90.0, power_w=310.0, memory_used_bytes=3 << 30)
    use = gpu_use(readings, SPAN)
    assert use.energy_j == pytest.approx(4000)
    assert use.utilization_percent == pytest.approx((20 + 60) / 2 + 0.5 * 0.15 * 30)
    assert (use.peak_utilization_percent, use.peak_power_w, use.peak_power_of_one_w) == (90.0, 410.0, 310.0)
    assert use.peak_memory_bytes == 3 << 30 and use.reasons == ()


def test_a_process_outside_of_the_topology_leaves_all_unknown_and_is_named() -> None:
    readings = _readings(range(8, 24))
    shared = [*readings[:5], _with_gpu(readings[5], 1, foreign=(ForeignProcess(77, "train"),)), *readings[6:]]
    use = gpu_use(shared, SPAN)
    assert use.energy_j is None and use.peak_memory_bytes is None
    assert use.reasons == ("train (pid 77) outside of the topology was on GPU 1, and its share is not known",)
    before = [_with_gpu(readings[0], 1, foreign=(ForeignProcess(77, "train"),)), *readings[1:]]
    assert gpu_use(before, SPAN).energy_j == pytest.approx(4000)  # it was gone when the part began


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"energy_j": None}, "NVML does not report the energy of GPU 0"),
        ({"utilization_percent": None}, "NVML does not report the utilization of a GPU"),
        ({"power_w": None}, "NVML does not report the power of a GPU"),
        ({"memory_used_bytes": None}, "NVML does not report the memory of a GPU"),
    ],
)
def test_a_value_that_nvml_does_not_report_is_named_and_leaves_the_others(lacks: dict[str, None], reason: str) -> None:
    use = gpu_use([_with_gpu(one, 0, **lacks) for one in _readings(range(8, 24))], SPAN)
    assert use.reasons == (reason,)
    assert [use.energy_j, use.utilization_percent, use.peak_power_of_one_w, use.peak_memory_bytes].count(None) == 1


def test_no_gpu_and_no_reading_are_two_reasons() -> None:
    readings = _readings([9, 21])
    assert gpu_use([replace(one, gpus=()) for one in readings], SPAN).reasons == ("the topology uses no GPU",)
    (unread,) = gpu_use([replace(one, gpus=None) for one in readings], SPAN).reasons
    assert unread.startswith("no GPU was read")


def _request(start_s: float, end_s: float, isl: int | None = 100, osl: int | None = 10) -> RequestRecord:
    ms = 1000 * (end_s - start_s)
    return RequestRecord(round(start_s * SECOND), round(end_s * SECOND), None, ms / 2, ms / 20, ms, isl, osl)


@given(st.integers(0, 30 * SECOND), st.lists(st.integers(1, 40 * SECOND), min_size=1, max_size=5, unique=True))
def test_input_tokens_of_adjacent_spans_are_all_of_a_request(start_ns: int, cuts: list[int]) -> None:
    request = replace(_request(0, 4), start_ns=start_ns, end_ns=start_ns + 4 * SECOND)
    edges = sorted({0, *cuts, 50 * SECOND})
    spans = [Span(first, last) for first, last in pairwise(edges)]
    assert sum(input_tokens_in(request, span) for span in spans) == pytest.approx(100)
    unstreamed = replace(request, time_to_first_token=None)
    assert sum(input_tokens_in(unstreamed, span) for span in spans) == pytest.approx(100)


def test_joules_and_cost_of_a_token_have_both_denominators() -> None:
    requests = [_request(10 + second, 11 + second) for second in range(10)]
    part = GpuPart.of_span(requests, SPAN, _readings(range(8, 24)), TWO)
    assert (part.input_tokens, part.output_tokens) == (1000, pytest.approx(100, abs=1))
    exact = replace(part, output_tokens=100.0)
    assert gpu_metrics.gpu_power.formula(exact) == pytest.approx(400)
    assert gpu_metrics.energy_per_output_token.formula(exact) == pytest.approx(40)
    assert gpu_metrics.energy_per_token.formula(exact) == pytest.approx(4000 / 1100)
    assert gpu_metrics.cost_per_million_output_tokens.formula(exact) == pytest.approx(1e6 * 3.6 * 2 * 10 / 3600 / 100)
    assert gpu_metrics.cost_per_million_tokens.formula(exact) == pytest.approx(1e6 * 3.6 * 2 * 10 / 3600 / 1100)


def test_tokens_that_are_not_counted_give_power_and_no_joules_a_token() -> None:
    requests = [_request(10, 15), _request(15, 20, osl=None)]
    for part in (
        GpuPart.of_trial(requests, _readings(range(8, 24)), TWO),
        GpuPart.of_span(requests, SPAN, _readings(range(8, 24)), TWO),
    ):
        assert gpu_metrics.gpu_power.formula(part) == pytest.approx(400)
        for metric in (
            gpu_metrics.energy_per_output_token,
            gpu_metrics.energy_per_token,
            gpu_metrics.cost_per_million_output_tokens,
            gpu_metrics.cost_per_million_tokens,
        ):
            assert metric.formula(part) is None
        assert part.reasons == ("answers carry no usage, so their tokens are not known",)


def test_the_cost_needs_the_number_of_gpus_and_no_readings() -> None:
    requests = [_request(10, 20)]
    known = GpuPart.of_trial(requests, (), PricedGpus(4, 2.0))
    assert gpu_metrics.cost_per_million_output_tokens.formula(known) == pytest.approx(1e6 * 2 * 4 * 10 / 3600 / 10)
    assert gpu_metrics.energy_per_token.formula(known) is None
    free = GpuPart.of_trial(requests, (), PricedGpus(4, 0.0))
    assert gpu_metrics.cost_per_million_tokens.formula(free) == 0
    for gpus in (PricedGpus(None, 2.0), PricedGpus(0, 2.0), PricedGpus(4, None)):
        assert gpu_metrics.cost_per_million_tokens.formula(GpuPart.of_trial(requests, (), gpus)) is None
    unknown = GpuPart.of_trial(requests, (), PricedGpus(None, 2.0))
    assert unknown.reasons[-1] == "the cost is not known, because the number of GPUs is not known"


def test_a_cell_is_the_mean_of_its_trials_or_their_peak_and_unknown_if_a_trial_is() -> None:
    requests = [_request(10, 20)]
    first, second = (
        GpuPart.of_trial(requests, _readings(range(8, 24), watts), TWO) for watts in ((100.0, 300.0), (200.0, 500.0))
    )
    both = Figures.over([requests, requests], None, [first, second])
    assert (both[gpu_metrics.gpu_power], both[gpu_metrics.gpu_power_peak]) == (pytest.approx(550), 700)
    assert gpu_metrics.gpu_power_per_device.read(both, 2) == pytest.approx(275)
    unread = GpuPart.of_trial(requests, (), TWO)
    assert Figures.over([requests, requests], None, [first, unread])[gpu_metrics.gpu_power] is None
    (reason,) = reasons_over([first, unread])
    assert reason.startswith("trial 2: no GPU was read")
    assert Figures.over([requests])[gpu_metrics.gpu_power] is None

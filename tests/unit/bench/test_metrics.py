from __future__ import annotations

import dataclasses

import pytest

from trtx.bench.metric_types import Figures, ValueRange
from trtx.bench.metrics import (
    benchmark_duration,
    cut_answer_rate,
    error_request_count,
    format_request_rate,
    images_per_second,
    input_sequence_length,
    input_sequence_lengths,
    inter_token_latency,
    most_common_errors,
    output_sequence_length,
    output_sequence_lengths,
    output_token_throughput,
    output_token_throughput_per_device,
    output_token_throughput_per_user,
    request_count,
    request_error_rate,
    request_throughput,
    time_to_first_token,
    tools_request_rate,
    uncounted_request_count,
)
from trtx.bench.phases import Span
from trtx.bench.records import RecordedFormat, RequestRecord

MS = 1_000_000


def ok(
    start_ms: int, end_ms: int, *, ttft: float = 100, itl: float | None = 10, tokens: int | None = 100
) -> RequestRecord:
    return RequestRecord(start_ms * MS, end_ms * MS, None, ttft, itl, end_ms - start_ms, 200, tokens)


def failed(start_ms: int, end_ms: int, error: str = "HTTP 500") -> RequestRecord:
    return RequestRecord(start_ms * MS, end_ms * MS, error, None, None, None, None, None)


def test_two_requests_of_a_hundred_tokens_in_half_a_second_are_400_tokens_a_second() -> None:
    records = [ok(100, 500), ok(200, 600)]
    assert benchmark_duration(records) == 0.5
    assert output_token_throughput(records) == 400
    assert request_throughput(records) == 4


def test_images_are_those_of_requests_that_succeeded_and_unknown_where_one_has_none_counted() -> None:
    two = [dataclasses.replace(ok(0, 500), image_count=2), dataclasses.replace(ok(0, 500), image_count=2)]
    assert images_per_second([*two, failed(500, 1000)]) == 4
    assert images_per_second([*two, ok(0, 500)]) is None
    assert images_per_second([failed(0, 500)]) is None
    half = Figures.over([two], [Span(0, 250 * MS)])
    assert half[images_per_second] == 8  # half of each request's two, in a quarter of a second


def test_shares_of_formats_are_of_all_requests_and_unknown_where_one_does_not_say() -> None:
    def asks(*what: str, outcome: str | None = "kept") -> RequestRecord:
        return dataclasses.replace(ok(0, 500), answer_format=RecordedFormat(what, outcome))

    refused = dataclasses.replace(failed(0, 500), answer_format=RecordedFormat(("format", "tools")))
    records = [asks("format"), asks("tools", outcome="free"), asks("tools", outcome="cut"), asks(outcome=None), refused]
    assert (format_request_rate(records), tools_request_rate(records)) == (40, 60)
    assert cut_answer_rate(records) == 50, "one of the two answers that had to follow something"
    assert format_request_rate([*records, ok(0, 500)]) is None and cut_answer_rate([asks(outcome=None)]) is None
    assert format_request_rate([]) is None


def test_a_failed_request_counts_in_the_time_and_the_error_rate_but_gives_no_tokens() -> None:
    records = [ok(0, 500), ok(0, 500), ok(0, 500), failed(500, 1000)]
    assert output_token_throughput(records) == 300
    assert request_throughput(records) == 3
    assert error_request_count(records) == 1
    assert request_error_rate(records) == 25


def test_tokens_per_user_is_the_median_of_each_users_own_rate() -> None:
    at_once = ok(0, 1, itl=0.001)  # a million tokens/s: one such answer must not move the figure far
    assert output_token_throughput_per_user([ok(0, 1, itl=5), ok(0, 1, itl=10), at_once]) == 200


def test_tokens_per_user_leaves_out_an_answer_that_came_in_one_piece() -> None:
    assert output_token_throughput_per_user([ok(0, 1, itl=None), ok(0, 1, itl=10)]) == 100


def test_tokens_per_device_divides_by_the_topologys_own_devices() -> None:
    of_cell = Figures.over([[ok(0, 500), ok(0, 500)]])  # 400 tokens/s
    assert output_token_throughput_per_device.read(of_cell, 4) == 100
    assert output_token_throughput_per_device.read(of_cell, 0) is None
    assert output_token_throughput_per_device.read(of_cell, None) is None, "nobody said how many there are"
    assert output_token_throughput_per_device.read(Figures.over([[failed(0, 500)]]), 4) is None


def test_percentiles_lie_between_neighbours_as_aiperfs_do() -> None:
    found = time_to_first_token([ok(0, 1, ttft=100 * n) for n in range(1, 12)])  # 100, 200 … 1100
    assert found is not None
    assert (found.count, found.avg, found[50], found[90]) == (11, 600, 600, 1000)
    assert found[99] == pytest.approx(1090)


def test_a_percentile_is_supported_only_with_enough_samples() -> None:
    found = inter_token_latency([ok(0, 1) for _ in range(64)])
    assert found is not None
    assert found.supports(50) and found.supports(90) and not found.supports(99)


def test_trials_pool_their_latencies_and_average_their_rates() -> None:
    of_cell = Figures.over([[ok(0, 1000, ttft=100)], [ok(5000, 5500, ttft=300)]])
    assert of_cell[output_token_throughput] == 150  # 100 and 200 tokens/s; the pause between trials is not measured
    assert of_cell[time_to_first_token] is not None
    assert (of_cell[time_to_first_token].count, of_cell[time_to_first_token].avg) == (2, 200)
    assert of_cell[request_count] == 2


def test_one_answer_without_usage_takes_every_figure_of_tokens_with_it_and_no_other() -> None:
    found = Figures.over([[ok(0, 1000), ok(0, 1000, itl=None, tokens=None)]])
    assert (found[request_count], found[uncounted_request_count]) == (2, 1)
    assert found[output_token_throughput] is None
    assert found[output_token_throughput_per_user] is None
    assert found[inter_token_latency] is None
    assert (found[input_sequence_length], found[output_sequence_length]) == (None, None)
    assert found[time_to_first_token] is not None and found[request_throughput] == 2


def test_a_trial_without_a_rate_leaves_the_cell_without_one() -> None:
    found = Figures.over([[ok(0, 1000)], [failed(5000, 5500)]])  # the other trial alone would be the better half
    assert (found[output_token_throughput], found[request_throughput]) == (None, None)
    assert found[benchmark_duration] == 0.75


def test_requests_that_failed_fast_leave_the_latencies_as_they_are() -> None:
    assert time_to_first_token([ok(0, 500, ttft=100), failed(0, 1)]) == time_to_first_token([ok(0, 500, ttft=100)])


def test_a_cell_where_everything_failed_has_counts_but_no_figure() -> None:
    of_cell = Figures.over([[failed(0, 100), failed(0, 200)]])
    assert (of_cell[request_count], of_cell[error_request_count], of_cell[request_error_rate]) == (0, 2, 100)
    assert of_cell[time_to_first_token] is None
    assert of_cell[output_token_throughput_per_user] is None
    assert (of_cell[output_token_throughput], of_cell[request_throughput]) == (None, None)


def test_the_most_common_error_comes_first() -> None:
    records = [failed(0, 1, "HTTP 500"), failed(0, 1, "timeout"), failed(0, 1, "HTTP 500")]
    assert most_common_errors(records) == (("HTTP 500", 2), ("timeout", 1))


def test_lengths_are_told_of_the_shortest_and_the_longest_and_not_where_one_is_unknown() -> None:
    short, long, bare = ok(0, 1, tokens=7), ok(0, 1, tokens=9), ok(0, 1, tokens=None)
    assert Figures.over([[short], [long, failed(0, 1)]])[output_sequence_lengths] == ValueRange(7, 9)
    assert Figures.over([[short, long, bare]])[output_sequence_lengths] is None
    assert Figures.over([[failed(0, 1)]])[input_sequence_lengths] is None


def test_an_answer_that_does_not_count_its_prompt_leaves_the_cell_without_an_isl() -> None:
    of_cell = Figures.over([[ok(0, 1), dataclasses.replace(ok(0, 1), input_sequence_length=None)]])
    assert (of_cell[input_sequence_length], of_cell[input_sequence_lengths]) == (None, None)
    assert of_cell[output_sequence_lengths] == ValueRange(100, 100)

"""Every figure has a formula, a value that was computed by hand, and a place to be seen."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from trtx.bench import Cell, LoadSpec, Trial, metrics, read_cells
from trtx.bench.cells import CELL
from trtx.bench.figures import (
    FIRST_SCHEMA,
    Distribution,
    Figure,
    Figures,
    Heading,
    Measured,
    Number,
    PerDevice,
    Range,
    Spread,
    all_figures,
    figure,
    latest_schema,
    per_device,
)
from trtx.bench.judge.checks import Level
from trtx.bench.judge.validity import Reason, Unchecked, Validity
from trtx.bench.records import RequestRecord
from trtx.errors import UsageError

METRICS = "trtx/bench/metrics.py"
KEPT = Path(__file__).parent / "kept"
NO_FIGURE = {"most_common_errors"}  # of the functions in METRICS
IN_NO_COLUMN = {  # of its own: they are told in words, or in the column of requests
    "request_count", "error_request_count", "uncounted_request_count", "request_error_rate",
    "input_sequence_lengths", "output_sequence_lengths",
}  # fmt: skip


def _record(start: int, end: int, ttft: float, itl: float, isl: int, osl: int) -> RequestRecord:
    """Times in ms."""
    return RequestRecord(start * 10**6, end * 10**6, None, ttft, itl, end - start, isl, osl, image_count=2)


# Two trials on two GPUs. The first runs 2 s, the second, with a request that failed, 1.5 s.
TRIALS = (
    (_record(0, 1000, 100, 10, 60, 100), _record(500, 2000, 200, 20, 64, 50)),
    (
        _record(10_000, 11_000, 300, 40, 68, 30),
        RequestRecord(10_000 * 10**6, 11_500 * 10**6, "HTTP 500", *[None] * 5),
    ),
)
DEVICES = 2
# Computed by hand. A distribution: its mean under None, and each percentile.
BY_HAND: dict[str, Any] = {
    "request_count": 3,
    "error_request_count": 1,
    "uncounted_request_count": 0,
    "request_error_rate": 25,
    "benchmark_duration": 1.75,  # 2 s and 1.5 s
    "request_throughput": (2 / 2 + 1 / 1.5) / 2,
    "images_per_second": (4 / 2 + 2 / 1.5) / 2,
    "output_token_throughput": 47.5,  # 150 tokens in 2 s, 30 in 1.5 s: 75 and 20 tokens/s
    "output_token_throughput_per_user": 50,  # of 100, 50, 25
    "output_token_throughput_per_device": 23.75,
    "time_to_first_token": {None: 200, 50: 200, 90: 280, 95: 290, 99: 298},
    "inter_token_latency": {None: 70 / 3, 50: 20, 90: 36, 95: 38, 99: 39.6},
    "request_latency": {None: 3500 / 3, 50: 1000, 90: 1400, 95: 1450, 99: 1490},
    "input_sequence_length": 64,
    "output_sequence_length": 60,
    "input_sequence_lengths": Range(60, 68),
    "output_sequence_lengths": Range(30, 100),
}


@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_is_what_it_is_by_hand(record: Figure[Any]) -> None:
    assert record.name in BY_HAND, (
        f"{record.name} has no value computed by hand: add what it is of TRIALS to BY_HAND in {Path(__file__).name}"
    )
    found, expected = record.read(Figures.over(TRIALS), DEVICES), BY_HAND[record.name]
    if isinstance(found, Distribution):
        assert set(record.columns) == set(expected), (
            f"{record.name} has the columns {record.columns}: give each its value by hand in {Path(__file__).name}"
        )
        found = {column: record.number(found, column) for column in record.columns}
    assert found == (expected if isinstance(expected, Range) else pytest.approx(expected)), (
        f"{record.name} is {found}, by hand {expected}: put its formula in {METRICS} right, or the value in "
        f"{Path(__file__).name}"
    )


# What a figure may be computed without, of one request that succeeded, and why.
SAMPLED_WITHOUT = {
    ("uncounted_request_count", "output_sequence_length"): "it counts them",
    ("output_token_throughput_per_user", "inter_token_latency"): "an answer of one token, or in one piece, has none",
    ("inter_token_latency", "inter_token_latency"): "the same; its count of samples says how many",
    ("time_to_first_token", "time_to_first_token"): "aiperf has none of an answer without streaming; its count says it",
    ("request_latency", "request_latency"): "its count of samples says how many",
}
OF_FAILURES = {  # what is known where no request succeeded, and what it is of one that failed
    "request_count": 0, "error_request_count": 1, "uncounted_request_count": 0, "request_error_rate": 100,
    "benchmark_duration": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("lacking", [one.name for one in dataclasses.fields(RequestRecord) if "None" in str(one.type)])
@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_of_a_part_of_the_requests_stands_for_no_other(record: Figure[Any], lacking: str) -> None:
    if lacking == "error" or (record.name, lacking) in SAMPLED_WITHOUT:
        return
    first, *others = TRIALS[0]
    gone: dict[str, Any] = {lacking: None}
    trials = ((dataclasses.replace(first, **gone), *others), TRIALS[1])
    found, whole = record.read(Figures.over(trials), DEVICES), record.read(Figures.over(TRIALS), DEVICES)
    assert found is None or found == whole, (
        f"{record.name} is {found} where one of three answers has no {lacking}, and {whole} of all three: what "
        f"is computed of some can't stand for all; make it None in {METRICS} (_counted, _all_counted), or say in "
        f"SAMPLED_WITHOUT of {Path(__file__).name} why it may"
    )


@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_that_nobody_can_know_is_none(record: Figure[Any]) -> None:
    found = record.read(Figures.over((TRIALS[1][1:],)), DEVICES)
    assert found == OF_FAILURES.get(record.name), (
        f"{record.name} is {found} where no request succeeded; expected {OF_FAILURES.get(record.name)}: a figure that "
        f"can't be computed is None, never 0, in {METRICS}; one that is known then stands in OF_FAILURES of "
        f"{Path(__file__).name}"
    )


BETTER = {  # the others say what was done, not how well
    "error_request_count": "lower", "uncounted_request_count": "lower", "request_error_rate": "lower",
    "request_throughput": "higher", "images_per_second": "higher",
    "output_token_throughput": "higher", "output_token_throughput_per_user": "higher",
    "output_token_throughput_per_device": "higher",
    "time_to_first_token": "lower", "inter_token_latency": "lower", "request_latency": "lower",
}  # fmt: skip


@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_says_which_way_a_server_is_better(record: Figure[Any]) -> None:
    assert record.better == BETTER.get(record.name), (
        f"{record.name} says better={record.better!r} in {METRICS}: put it right there, or in BETTER of "
        f"{Path(__file__).name}; a gate takes it for the way in which the figure regresses"
    )
    if isinstance(record, PerDevice):
        assert record.better == record.of.better


OURS_ALONE = {"uncounted_request_count", "output_token_throughput_per_device", "images_per_second"}


@pytest.mark.slow
def test_aiperf_takes_the_same_rates_for_better_high() -> None:
    from aiperf.common.enums import MetricFlags
    from aiperf.metrics.metric_registry import MetricRegistry

    shared = BETTER.keys() & set(MetricRegistry.all_tags())
    strangers = sorted(BETTER.keys() - shared - OURS_ALONE)
    assert not strangers, (
        f"aiperf has no metric {', '.join(strangers)}: call the figure in {METRICS} as aiperf does, or, where it has "
        f"none of the kind, name it in OURS_ALONE of {Path(__file__).name}"
    )
    for name, better in BETTER.items():
        if name in shared:
            flags = MetricRegistry.get_class(name).flags
            assert flags.has_flags(MetricFlags.LARGER_IS_BETTER) == (better == "higher"), name


def test_every_formula_is_a_figure() -> None:
    loose = {
        name
        for name, value in vars(metrics).items()
        if inspect.isfunction(value) and value.__module__ == metrics.__name__ and not name.startswith("_")
    } - NO_FIGURE
    assert not loose, (
        f"nobody computes {sorted(loose)}: put @figure(…) with title, unit and meaning over it in {METRICS}"
    )


@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_is_seen_on_the_page(record: Figure[Any]) -> None:
    assert (record.heading is None) == (record.name in IN_NO_COLUMN), (
        f"{record.name} stands in no table: give its record in {METRICS} a heading and a label, or, where it is told "
        f"in words, name it in IN_NO_COLUMN of {Path(__file__).name}"
    )


def test_a_column_that_a_figure_does_not_have_is_an_error_when_the_program_is_read() -> None:
    said = {"title": "x", "unit": "ms", "meaning": "x"}
    with pytest.raises(
        ValueError, match=r"figure nothing: its table has \{98\}, its columns are \(None, 50, 90, 95, 99\)"
    ):
        figure(Spread, table={98: "p98"}, **said)(nothing)
    with pytest.raises(ValueError, match="its markdown has"):
        figure(Spread, markdown=[98], **said)(nothing)
    with pytest.raises(ValueError, match="two figures are called request_count"):
        figure(Number[int], **said)(request_count)
    assert "nothing" not in {record.name for record in all_figures()}


def test_a_record_that_contradicts_itself_is_an_error_when_the_program_is_read() -> None:
    said = {"title": "x", "unit": "tokens", "meaning": "x"}
    with pytest.raises(ValueError, match=r"nothing: its unit is tokens, and it stands under 'TTFT, ms'; expected ms"):
        figure(Spread, heading=Heading.TTFT, **said)(nothing)
    for alone in ({"mean_over_trials": True}, {"within": lambda records, span: None}):
        with pytest.raises(ValueError, match="nothing: mean_over_trials and within= belong together"):
            figure(Number[float | None], **said, **alone)(nothing)
    with pytest.raises(
        ValueError, match="figures input_sequence_length and nothing both stand under 'tokens' as 'ISL'"
    ):
        figure(Number[float | None], heading=Heading.LENGTHS, label="ISL", **said)(nothing)


@pytest.mark.parametrize("text", [{"title": "x/{device}"}, {"unit": "x/{device}"}, {"table": {None: "/{device}"}}])
def test_a_text_over_devices_belongs_to_a_figure_over_devices(text: dict[str, Any]) -> None:
    said = {"title": "x", "unit": "ms", "meaning": "x"} | text
    with pytest.raises(ValueError, match=r"figure nothing: its texts have \{device\}; expected nothing.* per_device"):
        figure(Spread, **said)(nothing)
    with pytest.raises(ValueError, match=r"its texts have \{gpu\}; expected .*\{device\}"):
        per_device(metrics.request_throughput, **said | {"label": "a {gpu}"})


def nothing(records: object) -> list[float]:
    return []


def request_count(records: object) -> int:
    return 0


def test_a_percentile_that_a_figure_does_not_have_is_no_figure_that_is_missing() -> None:
    found = Figures.over(TRIALS)[metrics.time_to_first_token]
    assert found is not None
    with pytest.raises(KeyError):
        found[98]


def test_a_latency_states_the_percentiles_that_its_own_samples_support() -> None:
    whole = [_record(0, 1000, 100, 10, 60, 100)] * 100
    at_once = [RequestRecord(0, 10**9, None, 100, None, 1000, 60, 100)] * 600
    found = Figures.over([whole + at_once])
    for record, supported in (
        (metrics.time_to_first_token, "p50 p90 p95 p99"),
        (metrics.inter_token_latency, "p50 p90"),
    ):
        assert record.flat(found[record], "x")["x_percentiles_supported"] == supported
    assert metrics.inter_token_latency.flat(None, "x")["x_percentiles_supported"] == ""


def test_a_window_is_what_a_figure_is_computed_from() -> None:
    first_second = Number[int](
        name="x", title="x", unit="requests", meaning="x", formula=len,
        window=lambda records: [record for record in records if record.end_ns <= 10**9],
    )  # fmt: skip
    assert first_second(TRIALS[0]) == 1


WANTED_OF_KEPT = {
    True: "a kept cell has a value of each figure of its schema. Is aiperf's tag in trtx/bench/records.py spelt as in "
    "profile_export.jsonl? Then keep one of tests/unit/report/golden/run/cells as make goldens wrote it",
    False: "a cell of an older schema can't have it: put since= right, and leave the kept cell as it was",
}


@pytest.mark.parametrize("version", range(FIRST_SCHEMA, latest_schema() + 1))
def test_a_cell_of_every_schema_that_is_read_can_be_read(version: int, tmp_path: Path) -> None:
    kept = KEPT / f"cell-schema-{version}.json"
    for record in all_figures():
        if isinstance(record, Number) and record.since > FIRST_SCHEMA:
            hint = get_type_hints(record.formula)["return"]
            assert type(None) in get_args(hint), f"{record.name} is None in an older cell: make it {hint} | None"
    assert kept.exists(), f"keep a cell.json of schema {version} as {kept.name} in tests/unit/bench/kept"
    (tmp_path / "cells" / "x").mkdir(parents=True)
    shutil.copy(kept, tmp_path / "cells" / "x" / CELL.file)
    try:
        (cell,) = read_cells(tmp_path)
    except UsageError as error:
        later = latest_schema() + 1
        pytest.fail(
            f"a cell of schema {version} can't be read any more: {error}. A figure that is new says since={later} in "
            f"its record ({METRICS}), a percentile percentiles_since={{98: {later}}}"
        )
    for record in all_figures():
        if isinstance(record, Measured):
            value, is_there = cell.value(record), record.since <= version
            assert (value is not None) == is_there, (
                f"{record.name}, since={record.since}, is {value} in {kept.name}: {WANTED_OF_KEPT[is_there]}"
            )


def test_what_a_cell_holds_survives_its_file_with_every_figure(tmp_path: Path) -> None:
    trial = Trial(1, "errors", "trial-01", Figures.over(TRIALS), Figures.over(TRIALS), (("HTTP 500", 1),), None)
    (load,) = LoadSpec(concurrency=(8,)).loads
    validity = Validity(
        Level.SUSPECT, (Reason("samples", Level.SUSPECT, "too few"),), (Unchecked("GPUs", "nobody looked"),)
    )
    cell = Cell("agg", load, "gpu", DEVICES, 1, (trial,), Figures.over(TRIALS), Figures.over(TRIALS), validity)
    CELL.write(tmp_path / "cells" / "agg-c8", cell.to_json())
    assert read_cells(tmp_path) == (cell,)
    kept = json.loads((tmp_path / "cells" / "agg-c8" / CELL.file).read_text())
    assert kept["schema_version"] == latest_schema() and kept["output_token_throughput_per_device"] == 23.75
    assert math.isclose(kept["figures"]["inter_token_latency"]["p90"], 36)

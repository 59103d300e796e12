"""What holds for every metric: what it is without some values, and its place in a file."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trtx.bench import Cell, LoadSpec, Trial, gpu_metrics, metrics, read_cells
from trtx.bench.cells import CELL
from trtx.bench.draft_counters import DraftCounts
from trtx.bench.gpu_use import GpuPart, PricedGpus
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.validity import Reason, Unchecked, Validity
from trtx.bench.metric_types import (
    FIRST_SCHEMA,
    Figures,
    MeasuredMetric,
    Metric,
    Number,
    Spread,
    all_figures,
    latest_schema,
    metric,
    per_device,
)
from trtx.bench.readings import GpuReading, ServerReading
from trtx.bench.records import RecordedFormat, RequestRecord
from trtx.errors import UsageError
from trtx.stats.percentiles import samples_needed

METRICS = "trtx/bench/metrics.py"
KEPT = {int(one.stem.rpartition("-")[2]): one for one in (Path(__file__).parent / "kept").glob("cell-schema-*.json")}
NO_FIGURE = {"most_common_errors"}  # of the functions in METRICS
READ_ALSO = {name: 7.0 for one in all_figures() if isinstance(one, MeasuredMetric) for name in one.reads}


def _record(start: int, end: int, ttft: float, itl: float, isl: int, osl: int) -> RequestRecord:
    """Times in ms."""
    return RequestRecord(
        start * 10**6, end * 10**6, None, ttft, itl, end - start, isl, osl, image_count=2,
        answer_format=RecordedFormat(("format", "tools"), "cut"), others=READ_ALSO,
    )  # fmt: skip


# Two trials on two GPUs. The first runs 2 s, the second, with a request that failed, 1.5 s.
TRIALS = (
    (_record(0, 1000, 100, 10, 60, 100), _record(500, 2000, 200, 20, 64, 50)),
    (
        _record(10_000, 11_000, 300, 40, 68, 30),
        RequestRecord(
            10_000 * 10**6, 11_500 * 10**6, "HTTP 500", *[None] * 5, answer_format=RecordedFormat(("format",))
        ),
    ),
)
DEVICES = 2
# Each GPU draws 100 W and is busy half of the time. Each second, a request drafts two tokens and the first is accepted.
READINGS = tuple(
    ServerReading(
        second * 10**9,
        tuple(
            GpuReading(
                f"GPU {index}", power_w=100.0, memory_used_bytes=2 << 30, utilization_percent=50.0,
                energy_j=100.0 * second, energy_at_ns=second * 10**9,
            )
            for index in range(DEVICES)
        ),
        None,
        drafts={"agg": {"agg-0": DraftCounts(
            9 + second, 18 + 2 * second, 9 + second, (9 + second, 9 + second), (9 + second, 0), 18 + 2 * second,
            1.0 + second, 20.0 + 4 * second,
        )}},
    )
    for second in range(-1, 14)
)  # fmt: skip
# What a number may be computed without, of one request that succeeded, and why. A distribution says how many samples
# it has.
SAMPLED_WITHOUT = {
    ("uncounted_request_count", "output_sequence_length"): "it counts them",
    ("output_token_throughput_per_user", "inter_token_latency"): "an answer of one token, or in one piece, has none",
}
OF_FAILURES = {  # what is known where no request succeeded, and what it is of one that failed
    "request_count": 0, "error_request_count": 1, "uncounted_request_count": 0, "request_error_rate": 100,
    "benchmark_duration": 1.5, "format_request_rate": 100, "tools_request_rate": 0,
    "gpu_utilization": 50, "gpu_utilization_peak": 50, "gpu_power": 200, "gpu_power_per_device": 100,
    "gpu_power_peak": 200, "single_gpu_power_peak": 100, "gpu_memory_peak": 2,
    "spec_decode_token_weighted_acceptance_length": 2, "spec_decode_overall_draft_acceptance_rate": 50,
    "decoded_tokens_per_step": 1.5, "draft_overhead": 25,
}  # fmt: skip


def _figures(trials: Sequence[Sequence[RequestRecord]]) -> Figures:
    gpus = PricedGpus(DEVICES, 3.6)
    return Figures.over(trials, None, [GpuPart.of_trial(trial, READINGS, gpus) for trial in trials])


FIELDS = [one.name for one in dataclasses.fields(RequestRecord) if "None" in str(one.type) and one.name != "error"]


@pytest.mark.parametrize("lacking", [*FIELDS, *READ_ALSO])
@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_of_a_part_of_the_requests_stands_for_no_other(record: Metric[Any], lacking: str) -> None:
    samples = {record.name, *record.reads} if isinstance(record, Spread) else set()
    if lacking in samples or (record.name, lacking) in SAMPLED_WITHOUT:
        return
    first, *others = TRIALS[0]
    gone: dict[str, Any] = {lacking: None} if lacking in FIELDS else {"others": {}}
    trials = ((dataclasses.replace(first, **gone), *others), TRIALS[1])
    found, whole = record.read(_figures(trials), DEVICES), record.read(_figures(TRIALS), DEVICES)
    assert found is None or found == whole, (
        f"{record.name} is {found} where one of three answers has no {lacking}, and {whole} of all three: what "
        f"is computed of some can't stand for all; make it None in {METRICS} (_counted, _all_counted), or say in "
        f"SAMPLED_WITHOUT of {Path(__file__).name} why it may"
    )


@pytest.mark.parametrize("record", all_figures(), ids=lambda record: record.name)
def test_a_figure_that_nobody_can_know_is_none(record: Metric[Any]) -> None:
    found = record.read(_figures((TRIALS[1][1:],)), DEVICES)
    assert found == OF_FAILURES.get(record.name), (
        f"{record.name} is {found} where no request succeeded; expected {OF_FAILURES.get(record.name)}: a figure that "
        f"can't be computed is None, never 0, in {METRICS}; one that is known then stands in OF_FAILURES of "
        f"{Path(__file__).name}"
    )


@pytest.mark.slow
def test_aiperf_takes_the_same_metrics_for_better_high() -> None:
    from aiperf.common.enums import MetricFlags
    from aiperf.metrics.metric_registry import MetricRegistry

    shared = [one for one in all_figures() if one.better and one.name in MetricRegistry.all_tags()]
    assert len(shared) > 5
    for record in shared:
        larger_is_better = MetricRegistry.get_class(record.name).flags.has_flags(MetricFlags.LARGER_IS_BETTER)
        assert larger_is_better == (record.better == "higher"), (
            f"{record.name} says better={record.better!r} in {METRICS}, and aiperf the opposite: correct it there"
        )


def test_every_formula_is_a_figure() -> None:
    loose = {
        name
        for module in (metrics, gpu_metrics)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    } - NO_FIGURE
    assert not loose, (
        f"nobody computes {sorted(loose)}: put @metric(…) with title, unit and meaning over it in {METRICS}"
    )


def test_a_column_that_a_figure_does_not_have_is_an_error_when_the_program_is_read() -> None:
    said = {"title": "x", "unit": "ms", "meaning": "x", "heading": None}
    with pytest.raises(
        ValueError,
        match=r"metric nothing: table has the columns \{98\}, but the metric has only \(None, 50, 90, 95, 99\)",
    ):
        metric(Spread, table={98: "p98"}, **said)(nothing)
    with pytest.raises(ValueError, match="markdown has the columns"):
        metric(Spread, markdown=[98], **said)(nothing)
    with pytest.raises(ValueError, match="two metrics are called request_count"):
        metric(Number[int], **said)(request_count)
    assert "nothing" not in {record.name for record in all_figures()}


def test_a_record_that_contradicts_itself_is_an_error_when_the_program_is_read() -> None:
    said = {"title": "x", "unit": "tokens", "meaning": "x", "heading": None}
    with pytest.raises(ValueError, match=r"nothing: its unit is tokens, but its heading is 'TTFT, ms'; use ms"):
        metric(Spread, **said | {"heading": metrics.Heading.TTFT})(nothing)
    for alone in ({"mean_over_trials": True}, {"within": lambda records, span: None}):
        with pytest.raises(ValueError, match="nothing: mean_over_trials and within= both concern time"):
            metric(Number[float | None], **said, **alone)(nothing)
    with pytest.raises(
        ValueError, match="metrics input_sequence_length and nothing are both labelled 'ISL' under 'tokens'"
    ):
        metric(Number[float | None], **said | {"heading": metrics.Heading.LENGTHS, "label": "ISL"})(nothing)


@pytest.mark.parametrize("text", [{"title": "x/{device}"}, {"unit": "x/{device}"}, {"table": {None: "/{device}"}}])
def test_a_text_over_devices_belongs_to_a_figure_over_devices(text: dict[str, Any]) -> None:
    said = {"title": "x", "unit": "ms", "meaning": "x", "heading": None} | text
    with pytest.raises(
        ValueError, match=r"metric nothing: its texts have \{device\}; expected no placeholder.* per_device"
    ):
        metric(Spread, **said)(nothing)
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
    for record, samples in ((metrics.time_to_first_token, 700), (metrics.inter_token_latency, 100)):
        supported = " ".join(f"p{q}" for q in record.percentiles if samples_needed(q) <= samples)
        assert record.flat(found[record], "x")["x_percentiles_supported"] == supported
    assert samples_needed(90) <= 100 < samples_needed(95) and samples_needed(99) <= 700
    assert metrics.inter_token_latency.flat(None, "x")["x_percentiles_supported"] == ""


def test_a_window_is_what_a_figure_is_computed_from() -> None:
    first_second = Number[int](
        name="x", title="x", unit="requests", meaning="x", heading=None, formula=len,
        window=lambda records: [record for record in records if record.end_ns <= 10**9],
    )  # fmt: skip
    assert first_second(TRIALS[0]) == 1


def _with_later(kept: Any, now: Any) -> Any:
    """A kept metric with the percentiles that were added later."""
    return now | kept if isinstance(kept, dict) and isinstance(now, dict) else kept


@pytest.mark.parametrize("version", range(FIRST_SCHEMA, latest_schema() + 1))
def test_a_cell_of_every_schema_that_is_read_can_be_read(version: int, tmp_path: Path) -> None:
    later = {one.name for one in all_figures() if isinstance(one, MeasuredMetric) and one.since > version}
    kept_version = min((one for one in KEPT if one >= version), default=max(KEPT))
    kept = KEPT[kept_version]
    document = json.loads(kept.read_text(encoding="utf-8")) | {"schema_version": version}
    for measured in (document, *document["trials"]):
        for part in ("figures", "steady"):
            known = _figures(TRIALS).stored if version > kept_version else {}
            found = {name: _with_later(value, known.get(name)) for name, value in (known | measured[part]).items()}
            measured[part] = {name: value for name, value in found.items() if name not in later}
    (tmp_path / "cells" / "x").mkdir(parents=True)
    (tmp_path / "cells" / "x" / CELL.file).write_text(json.dumps(document), encoding="utf-8")
    try:
        (cell,) = read_cells(tmp_path)
    except UsageError as error:
        pytest.fail(
            f"trtx can't read a cell of schema {version} any more: {error}. If {kept.name} lacks the metric, set "
            f"since={max(KEPT) + 1} in its record in {METRICS} (for a percentile percentiles_since={{98: "
            f"{max(KEPT) + 1}}}); a number is {{float | None}}"
        )
    for record in all_figures():
        if isinstance(record, MeasuredMetric):
            assert (cell.value(record) is None) == (record.name in later), record.name
    CELL.write(tmp_path / "again", cell.to_json())  # as a baseline holds it: in the current version
    assert CELL.read(tmp_path / "again", Cell) == cell


def test_what_a_cell_holds_survives_its_file_with_every_figure(tmp_path: Path) -> None:
    trial = Trial(1, "errors", "trial-01", Figures.over(TRIALS), Figures.over(TRIALS), (("HTTP 500", 1),), None)
    (load,) = LoadSpec(concurrency=(8,)).loads
    validity = Validity(
        ValidityLevel.SUSPECT,
        (Reason("samples", ValidityLevel.SUSPECT, "too few"),),
        (Unchecked("GPUs", "nobody looked"),),
    )
    cell = Cell("agg", load, "gpu", DEVICES, 1, (trial,), Figures.over(TRIALS), Figures.over(TRIALS), validity)
    CELL.write(tmp_path / "cells" / "agg-c8", cell.to_json())
    assert read_cells(tmp_path) == (cell,)
    kept = json.loads((tmp_path / "cells" / "agg-c8" / CELL.file).read_text())
    assert kept["schema_version"] == latest_schema() and kept["output_token_throughput_per_device"] == 23.75
    assert math.isclose(kept["figures"]["inter_token_latency"]["p90"], 36)

"""Whole trials and their steady parts, and intervals over trials, in every form of a report."""

from __future__ import annotations

import copy
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.shown_forms import console_text
from trtx.bench.metric_types import all_figures
from trtx.bench.metrics import output_token_throughput, time_to_first_token
from trtx.report import read_run, render
from trtx.report.charts import Chart, charts
from trtx.report.columns import margin_text

pytestmark = pytest.mark.slow

T_OF_TWO_TRIALS = 12.706204736  # Student's, one degree of freedom, 0.975; of a table
RATES, MEDIANS = (100.0, 104.0), (20.0, 21.0)
HALF_RATE, HALF_MEDIAN = (T_OF_TWO_TRIALS * (b - a) / 2 for a, b in (RATES, MEDIANS))


def with_trials(run: Path, name: str = "agg-c1", part: str = "figures") -> None:
    """Two trials, whose tokens/s and TTFT p50 over one of their parts are known."""
    path = run / "cells" / name / "cell.json"
    document = json.loads(path.read_text())
    trials = [copy.deepcopy(document["trials"][0]) | {"number": number} for number in (1, 2)]
    for trial, rate, median in zip(trials, RATES, MEDIANS, strict=True):
        trial[part] |= {"output_token_throughput": rate}
        trial[part]["time_to_first_token"] |= {"p50": median, "count": 12}
    document[part] |= {"output_token_throughput": 102.0}
    document[part]["time_to_first_token"] |= {"p50": 20.5, "count": 24}
    path.write_text(json.dumps(document | {"trials": trials, "trials_asked": 2}))


def first_row(run: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((run / "summary.json").read_text())["rows"][0]
    return row


def drawn(run: Path) -> dict[str, Chart]:
    return charts(read_run(run), (64, 16))


def test_summaries_have_students_interval_of_each_number_over_the_trials(golden_run: Path) -> None:
    with_trials(golden_run)
    render(golden_run)
    row = first_row(golden_run)
    ends = {key: (row[f"{key}_low"], row[f"{key}_high"]) for key in ("output_token_throughput",)}
    assert ends["output_token_throughput"] == pytest.approx((102 - HALF_RATE, 102 + HALF_RATE))
    assert row["output_token_throughput_per_worker_low"] == pytest.approx(102 - HALF_RATE)
    found = (row["time_to_first_token_p50_low"], row["time_to_first_token_p50_high"])
    assert found == pytest.approx((20.5 - HALF_MEDIAN, 20.5 + HALF_MEDIAN))
    with (golden_run / "summary.csv").open() as file:
        assert float(next(csv.DictReader(file))["output_token_throughput_low"]) == row["output_token_throughput_low"]


def test_both_workers_of_a_topology_share_its_interval(golden_run: Path) -> None:
    with_trials(golden_run, "disagg-c1")
    render(golden_run)
    row = json.loads((golden_run / "summary.json").read_text())["rows"][2]
    assert row["output_token_throughput_per_worker_high"] == pytest.approx((102 + HALF_RATE) / 2)


def test_one_trial_has_no_interval_and_every_form_says_why(golden_run: Path) -> None:
    render(golden_run)
    row = first_row(golden_run)
    ends = [key for key in row if key.endswith(("_low", "_high"))]
    assert ends and {row[key] for key in ends} == {None}
    for name in ("summary.md", "report.html"):
        text = (golden_run / name).read_text(encoding="utf-8")
        assert "No intervals: a cell has one trial" in text and not re.search(r"±\d", text), name
    for chart in drawn(golden_run).values():
        assert not any({"error_x", "error_y"} & set(line) for line in chart["data"])


@pytest.mark.parametrize("lacking", ["count", "value"])
def test_a_number_that_one_trial_lacks_or_has_too_few_requests_for_has_no_interval(
    golden_run: Path, lacking: str
) -> None:
    with_trials(golden_run)
    path = golden_run / "cells" / "agg-c1" / "cell.json"
    document = json.loads(path.read_text())
    third = copy.deepcopy(document["trials"][0]) | {"number": 3}
    if lacking == "count":
        third["figures"]["time_to_first_token"]["count"] = 10  # p50 takes 11
    else:
        third["figures"]["time_to_first_token"] = None
    document |= {"trials": [*document["trials"], third], "trials_asked": 3}
    path.write_text(json.dumps(document))
    render(golden_run)
    row = first_row(golden_run)
    assert row["time_to_first_token_p50"] and row["time_to_first_token_p50_low"] is None
    assert row["output_token_throughput_low"] is not None
    assert row["time_to_first_token_p99_low"] is None  # 12 requests


def test_the_page_and_markdown_have_half_of_the_interval_beside_its_number(golden_run: Path) -> None:
    with_trials(golden_run)
    render(golden_run)
    assert "| 102 ±25 | " in (golden_run / "summary.md").read_text()
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    assert ">102<small>±25</small></td>" in page and ">20.5<small>±6.4</small></td>" in page
    assert ">64.0</td>" in page and ">64.0<small>" not in page  # a length was asked: it has no interval
    assert "Student&#39;s interval of 95 % over the trials" in page
    assert "±" not in console_text(golden_run)


def test_plots_have_bars_to_the_ends_of_the_intervals_where_there_are_some(golden_run: Path) -> None:
    with_trials(golden_run)
    (line, *_) = drawn(golden_run)["throughput"]["data"]
    assert line["error_y"]["array"] == [pytest.approx(HALF_RATE), None]
    assert line["error_y"]["arrayminus"] == [pytest.approx(HALF_RATE), None]
    (median, *_) = drawn(golden_run)["ttft"]["data"]
    assert median["error_y"]["array"] == [pytest.approx(HALF_MEDIAN), None]


def test_a_bar_does_not_reach_below_zero_nor_flatten_the_chart(golden_run: Path) -> None:
    with_trials(golden_run)
    path = golden_run / "cells" / "agg-c1" / "cell.json"
    document = json.loads(path.read_text())
    document["trials"][1]["figures"]["output_token_throughput"] = 5000.0
    path.write_text(json.dumps(document))
    chart = drawn(golden_run)["throughput"]
    assert chart["data"][0]["error_y"]["arrayminus"][0] == pytest.approx(102.0)  # of a low end far below 0
    most = max(y for line in chart["data"] for y in line["y"])
    assert chart["layout"]["yaxis"]["range"][0] == 0 and most < chart["layout"]["yaxis"]["range"][1] < 2 * most


def test_steady_figures_stand_beside_the_whole_ones_under_their_own_names(golden_run: Path) -> None:
    with_trials(golden_run, part="steady")
    view = render(golden_run)
    row, cell = first_row(golden_run), view.rows[0].cell
    assert cell is not None and cell.steady is not None
    assert row["output_token_throughput"] == view.rows[0].value(output_token_throughput)
    assert row["steady_output_token_throughput"] == 102.0 != row["output_token_throughput"]
    assert row["steady_time_to_first_token_p50"] == 20.5
    assert row["steady_output_token_throughput_low"] == pytest.approx(102 - HALF_RATE)
    assert row["steady_request_count"] == cell.steady.stored["request_count"] < row["request_count"]
    plain = {key for key in row if f"steady_{key}" in row}
    assert {key.removeprefix("steady_") for key in row if key.startswith("steady_")} == plain


def test_the_page_has_a_table_of_each_part_and_says_which_is_which(golden_run: Path) -> None:
    with_trials(golden_run, part="steady")
    render(golden_run)
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    tables = dict(re.findall(r'<table class="of-(whole|steady)">(.*?)</table>', page, re.DOTALL))
    assert ">102<small>±25</small></td>" in tables["steady"] and ">102<" not in tables["whole"]
    assert "Steady part: the requests sent while the load was steady" in page


def test_a_cell_without_a_steady_part_has_dashes_there_and_its_whole_figures(golden_run: Path) -> None:
    path = golden_run / "cells" / "agg-c1" / "cell.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steady": None}))
    view = render(golden_run)
    row = first_row(golden_run)
    assert row["output_token_throughput"] and row["steady_output_token_throughput"] is None
    assert row["steady_request_count"] is None
    assert view.rows[0].value(time_to_first_token, "steady") is None
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    steady = page[page.index('<table class="of-steady">') :]
    (first, *_) = re.findall(r"<tbody>.*?</tr>", steady, re.DOTALL)
    assert ">–<small" in first  # the requests, above their validity
    shown = first.count(">–</td>")
    columns = sum(
        len(record.columns)
        for record in all_figures()
        if record.heading is not None and not record.of_images and not record.if_known
    )
    assert shown == columns, (
        f"a cell without a steady part has {shown} dashes in its row, its figures have {columns} columns on the page: "
        "trtx/report/view.py and page.py write – for each that is None"
    )


def test_margins_have_two_digits() -> None:
    values = (0.0, 0.0123, 0.629, 4.42, 25.2, 99.6, 431.0, 1982.0)
    assert [margin_text(value) for value in values] == ["0", "0.012", "0.63", "4.4", "25", "100", "430", "2,000"]


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_margin_is_written_within_half_of_its_second_digit(value: float) -> None:
    assert float(margin_text(value).replace(",", "")) == pytest.approx(value, rel=0.051)

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.report import RunView, read_run
from trtx.report.charts import Chart, charts, pareto_front, ticks
from trtx.report.columns import number
from trtx.report.series import Mark, marks


def drawn(run: Path) -> dict[str, Chart]:
    return charts(read_run(run), (64, 16))


def test_the_front_holds_what_no_other_point_beats() -> None:
    assert pareto_front([(100, 300), (200, 200), (300, 100), (150, 150)]) == [(100, 300), (200, 200), (300, 100)]


def test_of_two_points_with_the_same_speed_a_user_the_one_with_more_throughput_stays() -> None:
    assert pareto_front([(100, 300), (100, 400)]) == [(100, 400)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_every_point_is_on_the_front_or_beaten_by_one_of_it(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    for x, y in points:
        assert any(fx >= x and fy >= y for fx, fy in front)
    for x, y in front:
        assert not any((fx >= x and fy >= y) and (fx, fy) != (x, y) for fx, fy in front)


def test_percentiles_without_enough_samples_are_not_drawn(golden_run: Path) -> None:
    names = [line["name"] for line in drawn(golden_run)["ttft"]["data"]]
    assert names == ["agg p50", "disagg p50"]  # 12 samples


def test_every_mode_has_its_points_in_the_pareto_chart(golden_run: Path) -> None:
    pareto = drawn(golden_run)["pareto"]
    points = {line["name"]: line["customdata"] for line in pareto["data"] if "text" in line}
    assert points == {mode: ["c1<br>SUSPECT cell", "c2<br>SUSPECT cell"] for mode in ("agg", "disagg")}
    assert pareto["layout"]["yaxis"]["title"]["text"] == "tokens/s/worker"


def test_numbers_carry_three_digits() -> None:
    assert [number(n) for n in (0, 0.1234, 1.234, 12.34, 123.4, 12345.6)] == [
        "0",
        "0.123",
        "1.23",
        "12.3",
        "123",
        "12,346",
    ]


def change(run: Path, **fields: object) -> None:
    for path in run.glob("cells/*/cell.json"):
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"load": document["load"] | fields}))


def test_curves_of_different_lengths_stand_in_charts_of_their_own(golden_run: Path) -> None:
    for path in golden_run.glob("cells/*-c2/cell.json"):
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"load": document["load"] | {"isl": 256, "label": "c2-i256-o16"}}))
    view = read_run(golden_run)
    assert view.length_pairs == ((64, 16), (256, 16))
    of_pairs = {pair: charts(view, pair)["throughput"]["data"] for pair in view.length_pairs}
    assert [[line["name"] for line in lines] for lines in of_pairs.values()] == [["agg", "disagg"]] * 2
    assert of_pairs[64, 16][0]["x"] == [1]
    assert of_pairs[256, 16][0]["x"] == [2]


def test_the_axis_of_an_open_loop_is_its_rate(golden_run: Path) -> None:
    for path in golden_run.glob("cells/*-c1"):  # of each topology one cell: two can't have one name
        shutil.rmtree(path)
    change(golden_run, concurrency=None, request_rate=2.5, label="r2.5")
    chart = drawn(golden_run)["throughput"]
    assert chart["layout"]["xaxis"]["title"]["text"] == "request rate, requests/s"
    assert chart["layout"]["xaxis"]["ticktext"][-1] == "2.5"
    assert chart["data"][0]["x"] == [2.5]


def many(run: Path, count: int) -> RunView:
    """The run with as many more topologies, all like its first cell."""
    (path,) = run.glob("cells/agg-c1/cell.json")
    for one in range(count):
        directory = run / "cells" / f"disagg-{one}p1d-c1"
        directory.mkdir()
        (directory / "cell.json").write_text(
            json.dumps(json.loads(path.read_text()) | {"topology": f"disagg-{one}p1d"})
        )
    return read_run(run)


def test_ten_topologies_have_a_color_and_symbol_each(golden_run: Path) -> None:
    view = many(golden_run, 9)
    without_disagg = replace(view, rows=tuple(row for row in view.rows if row.topology != "disagg"))
    assert len(without_disagg.labels) == len(set(marks(without_disagg).values())) == 10
    found = marks(replace(view, rows=tuple(row for row in view.rows if row.topology != "disagg-8p1d")))
    assert len(found) == 10 and len(set(found.values())) == 10
    assert found["agg"] == Mark("#0072B2", "circle") and found["disagg"] == Mark("#D55E00", "diamond")


def test_a_title_names_up_to_four_topologies(golden_run: Path) -> None:
    assert read_run(golden_run).labels_text == "agg and disagg"
    assert many(golden_run, 1).labels_text == "agg, disagg and disagg-0p1d"
    for path in golden_run.glob("cells/disagg-0p1d-c1/*"):
        path.unlink()
    (golden_run / "cells" / "disagg-0p1d-c1").rmdir()
    assert many(golden_run, 3).labels_text == "5 topologies"


def test_tails_are_drawn_as_long_as_they_can_be_told_apart(golden_run: Path) -> None:
    for path in golden_run.glob("cells/*/cell.json"):
        document = json.loads(path.read_text())
        document["figures"]["time_to_first_token"]["count"] = 64  # p90 takes as many
        path.write_text(json.dumps(document))
    assert [line["name"] for line in drawn(golden_run)["ttft"]["data"]] == [
        "agg p50", "agg p90", "disagg p50", "disagg p90",
    ]  # fmt: skip
    view = many(golden_run, 4)
    assert {line["name"].split()[-1] for line in charts(view, (64, 16))["ttft"]["data"]} == {"p50"}


@given(st.sets(st.integers(1, 4096), min_size=1))
def test_ticks_of_the_load_are_apart_and_have_the_largest(loads: set[int]) -> None:
    found = ticks(sorted(loads))
    assert found[-1] == max(loads) and set(found) <= loads
    span = math.log(max(loads) / min(loads))
    assert all(math.log(after / before) >= 0.08 * span * 0.999 for before, after in pairwise(found))


@pytest.mark.parametrize(("most", "shown"), [(900.0, "200"), (90_000.0, "1,000")])
def test_a_logarithmic_axis_has_ticks_to_read_it_by(golden_run: Path, most: float, shown: str) -> None:
    path = golden_run / "cells" / "agg-c2" / "cell.json"
    document = json.loads(path.read_text())
    document["figures"]["time_to_first_token"]["p50"] = most
    path.write_text(json.dumps(document))
    axis = drawn(golden_run)["ttft"]["layout"]["yaxis"]
    low, high = (10**end for end in axis["range"])
    within = [text for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if low < value < high]
    assert axis["type"] == "log" and shown in within and 3 <= len(within) <= 6

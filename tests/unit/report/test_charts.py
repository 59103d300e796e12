from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trtx.report import read_run
from trtx.report.charts import charts, pareto_front
from trtx.report.columns import number


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
    names = [line["name"] for line in charts(read_run(golden_run))["ttft"]["data"]]
    assert names == ["agg p50", "disagg p50"]  # 12 samples


def test_every_mode_has_its_points_in_the_pareto_chart(golden_run: Path) -> None:
    drawn = charts(read_run(golden_run))["pareto"]
    points = {line["name"]: line["text"] for line in drawn["data"] if "text" in line}
    assert points == {"agg": ["c1", "c2"], "disagg": ["c1", "c2"]}
    assert drawn["layout"]["yaxis"]["title"]["text"] == "tokens/s/worker"


def test_numbers_carry_three_digits() -> None:
    assert [number(n) for n in (0, 0.1234, 1.234, 12.34, 123.4, 12345.6)] == [
        "0",
        "0.123",
        "1.23",
        "12.3",
        "123",
        "12,346",
    ]


def test_labels_of_the_pareto_chart_point_away_from_the_edge_next_to_them(golden_run: Path) -> None:
    rates = {("agg", 1): 5.0, ("agg", 2): 95.0, ("disagg", 1): 50.0, ("disagg", 2): 100.0}
    for (mode, concurrency), rate in rates.items():
        path = golden_run / "cells" / f"{mode}-c{concurrency}" / "cell.json"
        document = json.loads(path.read_text())
        document["figures"]["output_token_throughput_per_user"] = rate
        path.write_text(json.dumps(document))
    drawn = charts(read_run(golden_run))["pareto"]["data"]
    sides = {line["name"]: line["textposition"] for line in drawn if "text" in line}
    assert sides == {"agg": ["middle right", "middle left"], "disagg": ["middle right", "middle left"]}

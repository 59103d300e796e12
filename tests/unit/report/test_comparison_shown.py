"""An A/B run wherever it is shown: who is who, the rounds, the ratios with their limit, what was judged, and why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_runs import NOISY, a_run, an_ab_run, change_cells, compared, gated, judged

from tests.unit.report.shown_forms import console_text
from trtx.bench import Cell
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.regression import DEFAULT_METRICS
from trtx.errors import UsageError
from trtx.experiment.bench import ab
from trtx.report import read_run, render
from trtx.report.comparison import ArmsShown, ComparedLine, arms_shown
from trtx.report.forest import forest
from trtx.runs.forms import COMPARISON, ComparedArms, ComparedMetric, Comparison, MeasuredStart
from trtx.stats.intervals import Interval

pytestmark = pytest.mark.slow

GATE: dict[str, Any] = {"baseline": "agg", "max_regression": "5%"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """disagg is slower than agg by more than the limit, in each of three rounds."""
    run = an_ab_run(tmp_path_factory.mktemp("ab") / "run", 1.1)
    compared(run, **GATE)
    render(run)
    return run


def section(run: Path) -> str:
    page = (run / "report.html").read_text()
    start = page.index('aria-label="A/B')
    return page[start : page.index("</section>", start)]


def test_every_form_says_who_is_who_the_order_and_what_differs(run: Path) -> None:
    markdown = (run / "summary.md").read_text()
    for shown in (console_text(run), markdown[markdown.index("## A/B") :], section(run)):
        assert "disagg against agg" in shown
        assert "A is agg, the baseline; B is disagg." in shown
        assert "Measured in the order AB BA AB; each topology was restarted for every round." in shown
        assert "topology.workers.decode" in shown
    assert "topology.workers.decode: A –, B 1" in console_text(run)
    assert "<code>topology.workers.decode</code></td><td>–</td><td>1</td>" in section(run)
    assert max(map(len, console_text(run).splitlines())) <= 80


def test_each_metric_has_both_values_its_ratio_its_limit_its_rounds_and_its_verdict(run: Path) -> None:
    assert "c1   inter_token_latency:p50     5.18 5.70 1.100 (1.100–1.100)" in console_text(run)
    row = next(line for line in (run / "summary.md").read_text().splitlines() if line.startswith("| c1"))
    assert "| output_token_throughput:avg | 141 | 129 | 0.909 (0.909–0.909) | 0.95 | regressed |" in row
    assert "| 0.909, 0.909, 0.909 |" in row and "all beyond the limit 0.95" in row
    page = " ".join(section(run).split())
    assert page.count('class="failed-text">regressed') == 1 + 2 * len(DEFAULT_METRICS)
    assert "<td>1.100 (1.100–1.100)</td><td>1.05</td>" in page and "all beyond the limit 1.05" in page
    assert page.count('scope="colgroup">round') == 3


def test_validity_stands_beside_each_cell_of_both_sides(run: Path) -> None:
    """The kept run's cells are SUSPECT: they have too few requests."""
    assert section(run).count('<small class="level SUSPECT">A SUSPECT</small>') == 2 * len(DEFAULT_METRICS)
    for shown in (section(run), (run / "summary.md").read_text()):
        assert shown.count("c1 SUSPECT: baseline: 10 requests succeeded") == 1
    view = read_run(run)
    rows = tuple(replace(row, cell=_valid(row.cell)) if row.name == "agg-c1" else row for row in view.rows)
    levels = {line.metric.cell: line.levels for line in arms_shown(replace(view, rows=rows))[0].lines}
    assert levels["c1"] == (("B", ValidityLevel.SUSPECT),) and len(levels["c2"]) == 2


def _valid(cell: Cell | None) -> Cell:
    assert cell is not None and cell.validity is not None
    return replace(cell, validity=replace(cell.validity, level=ValidityLevel.VALID, reasons=()))


def test_rendering_again_gives_the_same_and_the_summary_has_it_as_it_is_kept(run: Path) -> None:
    before = {name: (run / name).read_bytes() for name in ("report.html", "summary.md", "summary.json")}
    render(run)
    assert before == {name: (run / name).read_bytes() for name in before}
    kept = json.loads((run / COMPARISON.file).read_text())
    assert kept.pop("schema_version") == 1
    assert json.loads((run / "summary.json").read_text())["comparison"] == kept


def test_an_ab_run_without_a_limit_is_compared_and_not_judged(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    compared(run)
    render(run)
    for shown in (console_text(run), (run / "summary.md").read_text(), section(run)):
        assert "Nothing was judged: no limit was given (--max-regression)." in shown and "regressed" not in shown
        assert "1.100 (1.100–1.100)" in shown


def test_one_that_ended_early_says_why_it_has_no_ratio(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.1)
    change_cells(run, lambda cell: replace(cell, trials=cell.trials[: 1 if cell.topology == "agg" else 2]))
    ab.keep_comparison(run, gated(run, **GATE), None)
    render(run)
    for shown in (console_text(run), (run / "summary.md").read_text(), section(run)):
        assert "Nothing was judged: the run ended early." in shown and "trial 3 of 3 has no result" in shown
    row = next(line for line in (run / "summary.md").read_text().splitlines() if "| inter_token_latency:p50 |" in line)
    assert "| – | – | – | 1.100, –, – |" in row
    figure = forest(arms_shown(read_run(run))[0])
    assert [trace["name"] for trace in figure["data"]] == ["rounds"]
    assert [one["text"] for one in figure["layout"]["annotations"]] == ["– no ratio"] * 6


def test_a_run_that_is_no_ab_run_has_no_section(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    judged(run)
    render(run)
    assert "A/B" not in (run / "summary.md").read_text() and 'id="forest' not in (run / "report.html").read_text()


def test_of_three_topologies_each_other_has_a_section_and_a_letter(run: Path, tmp_path: Path) -> None:
    kept = COMPARISON.read(run, ComparedArms)
    other = replace(kept.comparisons[0], candidate="third<b>")
    starts = tuple(MeasuredStart(label, 1) for label in ("agg", "disagg", "third<b>"))
    view = replace(read_run(run), arms=ComparedArms(starts, (*kept.comparisons, other)))
    one, two = arms_shown(view)
    assert (one.letters, two.letters, one.order) == (("A", "B"), ("A", "C"), "ABC")
    assert two.ratio_name == "C / A"


def test_a_metric_that_nobody_knows_is_named_with_its_file(run: Path, tmp_path: Path) -> None:
    kept = COMPARISON.read(run, ComparedArms).comparisons[0]
    unknown = ComparedLine(replace(kept.metrics[0], metric="itl"))
    with pytest.raises(UsageError, match="comparison.json: metric itl: no metric is called 'itl'"):
        _ = unknown.label


# The forest plot


def shown_of(run: Path) -> ArmsShown:
    return arms_shown(read_run(run))[0]


def test_the_forest_has_a_row_a_metric_with_its_interval_and_limit_on_a_logarithmic_axis(run: Path) -> None:
    figure = forest(shown_of(run))
    rounds, regressed = figure["data"]
    axis = figure["layout"]["xaxis"]
    assert axis["type"] == "log" and "1" in axis["ticktext"]
    assert figure["layout"]["yaxis"]["ticktext"] == [
        f"{cell} {metric}" for cell in ("c1", "c2") for metric in ("tokens/s", "TTFT p50", "ITL p50")
    ]
    assert len(rounds["x"]) == 3 * 6 and regressed["name"] == "regressed"
    assert regressed["x"] == pytest.approx([1 / 1.1, 1.1, 1.1] * 2) and regressed["y"] == [*range(6)]
    limits = [one["x0"] for one in figure["layout"]["shapes"] if one["type"] == "line"]
    assert limits == pytest.approx([1, 0.95, 1.05, 1.05, 0.95, 1.05, 1.05])
    beyond = [(one["x0"], one["x1"]) for one in figure["layout"]["shapes"] if one["type"] == "rect"]
    low, high = (10**end for end in axis["range"])
    assert beyond[0] == pytest.approx((low, 0.95)), "less of a throughput is worse"
    assert beyond[1] == pytest.approx((1.05, high)), "more of a latency is worse"


def test_what_was_judged_differently_is_told_apart_by_its_shape(tmp_path: Path) -> None:
    run = an_ab_run(tmp_path / "run", 1.0)
    noisy = an_ab_run(tmp_path / "noisy", 1.0, rounds=NOISY)
    for kept in (noisy / "cells").glob("disagg-c2/cell.json"):
        (run / "cells" / "disagg-c2" / "cell.json").write_text(kept.read_text())
    compared(run, **GATE)
    traces = {trace["name"]: trace["marker"]["symbol"] for trace in forest(shown_of(run))["data"][1:]}
    assert traces == {"pass": "circle", "no verdict": "circle-open"}


RATIOS = st.floats(1e-3, 1e3)


@st.composite
def metrics(draw: st.DrawFn) -> ComparedMetric:
    """With a ratio and an interval as wild as rounds can make it, or none."""
    low, estimate, high = sorted((draw(st.floats(1e-300, 1e3)), draw(RATIOS), draw(st.floats(1e-3, 1e300))))
    ratio = draw(st.none() | st.just(Interval(estimate, low, high, 0.99)))
    values = st.sampled_from([None, 0.0]) | RATIOS
    rounds = draw(st.lists(st.tuples(values, values), max_size=4))
    limit, verdict = draw(st.sampled_from([(None, None), (0.95, Verdict.PASS), (1.5, Verdict.NO_VERDICT)]))
    return ComparedMetric(
        "c8", "inter_token_latency:p50", 1.0, None, "ms", ratio, limit, verdict, "why", (), tuple(rounds)
    )


@given(st.lists(metrics(), max_size=5))
def test_whatever_was_measured_its_estimates_limits_and_one_lie_on_the_axis(found: list[ComparedMetric]) -> None:
    comparison = Comparison("a", "b", (), (), tuple(found), "whole")
    figure = forest(ArmsShown(comparison, ("A", "B"), "AB", tuple(map(ComparedLine, found)), False))
    text = json.dumps(figure, allow_nan=False)
    assert "Infinity" not in text
    low, high = (10**end for end in figure["layout"]["xaxis"]["range"])
    inside = [1.0, *(one.limit for one in found if one.limit), *(one.ratio.estimate for one in found if one.ratio)]
    assert all(low < value < high for value in inside)
    span = math.log(max(inside) / min(inside)) + sum(
        abs(math.log(one.ratio)) for metric in found for one in ComparedLine(metric).rounds if one.ratio
    )
    assert math.log(high / low) <= 1.5 * 3 * max(span, math.log(1.04)), "an interval far wider runs out of the chart"
    drawn = [trace for trace in figure["data"] if trace["name"] != "rounds"]
    assert sum(len(trace["x"]) for trace in drawn) == sum(one.ratio is not None for one in found)
    assert len(figure["layout"]["annotations"]) == sum(one.ratio is None for one in found)
    assert len(figure["layout"]["xaxis"]["tickvals"]) < 60

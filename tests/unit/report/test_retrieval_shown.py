"""Retrieval over length and depth as it is shown: every field with its interval, and a dash where nobody answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judged_runs import a_needle_run, retrieval
from rich.console import Console

from trtx.report.evaluation import read_evaluation_view, render_evaluation
from trtx.report.retrieval import heat_map

FOUND = (
    retrieval(512, 0, 10, 10), retrieval(512, 50, 9, 10), retrieval(512, 100, 4, 8),
    retrieval(1024, 0, 0, 10), retrieval(1024, 50, 0, 0), retrieval(1024, 100, 0, 0, samples=0),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One field has answers to 8 of 10, one to none, and one was not asked."""
    return a_needle_run(tmp_path, FOUND)


def test_a_heat_map_has_no_colour_where_there_is_no_answer(run: Path) -> None:
    (grid,) = read_evaluation_view(run).grids
    drawn = heat_map(grid)
    (trace,) = drawn["data"]
    assert (trace["x"], trace["y"]) == (["512", "1,024"], ["0", "50", "100"])
    assert trace["z"] == [[1, 0], [0.9, None], [0.5, None]]  # a row a depth
    assert (trace["zmin"], trace["zmax"]) == (0, 1)
    assert trace["text"][0] == ["1.00<br>(0.72–1.00)", "0.00<br>(0.00–0.28)"]
    assert "2 without an answer" in trace["customdata"][2][0]
    assert [row[1] for row in trace["text"][1:]] == ["–", "–"]


def test_every_form_shows_each_field_and_its_interval(run: Path) -> None:
    render_evaluation(run)
    told = (run / "summary.md").read_text()
    assert "| tokens | depth 0 % | depth 50 % | depth 100 % |\n|--:|--:|--:|--:|\n" in told
    assert "| 512 | 1.00 (0.72–1.00) | 0.90 (0.60–0.98) | 0.50 (0.22–0.78) |" in told
    assert "| 1,024 | 0.00 (0.00–0.28) | – | – |" in told
    assert "## Retrieval over length and depth: agg, needle\n" in told
    assert "share retrieved, 0 to 10 samples each" in told and "met to within 8 tokens" in told
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(read_evaluation_view(run).on_terminal)
    shown = captured.get()
    assert "1,024 0.00 (0.00–0.28)                –                –" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    (kept,) = json.loads((run / "summary.json").read_text())["scores"][0]["tasks"]
    assert kept["retrievals"][4]["retrieved"] is None and kept["retrievals"][5]["least_tokens"] is None


def test_plotly_is_in_the_page_only_where_it_draws(run: Path) -> None:
    render_evaluation(run)
    page = (run / "report.html").read_text()
    assert 'id="retrieval-agg-needle"' in page and "script-src 'unsafe-inline'" in page and len(page) > 1_000_000
    a_needle_run(run, ())
    render_evaluation(run)
    page = (run / "report.html").read_text()
    assert "script" not in page and len(page) < 100_000

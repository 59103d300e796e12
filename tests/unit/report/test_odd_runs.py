"""Runs in which something is lacking, or is called oddly: every form says the same of them, and nothing that it can't
know."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trtx.bench import Cell, cell_directory, read_cells
from trtx.bench.cells import CELL as CELL_FILE
from trtx.bench.cells import measure_cell
from trtx.bench.metric_types import PerDevice, all_figures
from trtx.bench.records import RECORDS_FILE
from trtx.cli.app import run as trtx
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock
from trtx.report import console_table, read_run, render
from trtx.report.columns import MISSING, markdown_columns, number

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]
CELL = "agg-c1"


def failed(measured: Lines) -> Lines:
    return [
        {**one, "error": {"code": 502, "type": "HTTP", "message": "bad <b>gateway"}, "metrics": {}} for one in measured
    ]


def cancelled(measured: Lines) -> Lines:
    return [{**one, "metadata": {**one["metadata"], "was_cancelled": True}} for one in measured]


def without_tokens(measured: Lines) -> Lines:
    """As of answers of zero tokens, which have neither a first one nor time between them."""
    for one in measured:
        one["metrics"]["output_sequence_length"]["value"] = 0
        one["metrics"].pop("time_to_first_token")
        one["metrics"].pop("inter_token_latency")
    return measured


def of_no_number(measured: Lines) -> Lines:
    """As JSON has what is not finite: null, or a word that Python reads all the same."""
    for one, odd in zip(measured, [None, float("nan"), float("inf")] * 4, strict=True):
        one["metrics"]["time_to_first_token"]["value"] = odd
    return measured


def few(measured: Lines) -> Lines:
    return measured[:1]


def at_once(measured: Lines) -> Lines:
    for one in measured:
        one["metadata"]["request_end_ns"] = one["metadata"]["request_start_ns"] = 1_795_307_858_000_000_000
    return measured


def recorded(run: Path, change: Callable[[Lines], Lines]) -> Cell:
    """The cell, measured again of records that were changed so."""
    path = cell_directory(run, CELL) / "trial-01" / RECORDS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    measured = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]
    others = [line for line in lines if line not in measured]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*others, *change(measured))))
    spec = read_lock(run)
    directory, load = cell_directory(run, CELL), spec.load.loads[0]
    cell = measure_cell(directory, read_recorded(run, spec).target("agg"), spec.load, load, [1], restarted=())
    CELL_FILE.write(directory, cell.to_json())
    return cell


def row_of(run: Path, form: str) -> dict[str, Any]:
    """The cell's, in a form that has one."""
    if form == "summary.json":
        rows = json.loads((run / form).read_text(), parse_constant=pytest.fail)["rows"]
    else:
        rows = list(csv.DictReader(io.StringIO((run / form).read_text())))
    return next(row for row in rows if (row["topology"], row["load"]) == ("agg", "c1"))


def console_text(run: Path, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False)
    console.print(console_table(read_run(run)), crop=False)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [failed, cancelled, without_tokens, of_no_number, few, at_once])
def test_every_form_has_the_same_of_a_cell_and_nothing_that_is_no_number(
    golden_run: Path, change: Callable[[Lines], Lines]
) -> None:
    recorded(golden_run, change)
    view = render(golden_run)
    shown = next(row for row in view.rows if row.name == CELL)
    of_json, of_csv = row_of(golden_run, "summary.json"), row_of(golden_run, "summary.csv")
    assert {key: "" if value is None else str(value) for key, value in of_json.items()} == of_csv
    cells = next(
        line.split(" | ") for line in (golden_run / "summary.md").read_text().splitlines() if "| agg | c1 |" in line
    )[4:]
    for column, text in zip(markdown_columns(view), cells, strict=True):
        value = of_json[column.key]
        assert text.strip(" |~") == (MISSING if value is None else number(value)), column.key
        assert (column.text(shown) == MISSING) == (value is None)
    page = re.sub(r"<script>.*?</script>", "", (golden_run / "report.html").read_text(), flags=re.DOTALL)
    for text in (
        page,
        console_text(golden_run),
        *((golden_run / f"summary.{form}").read_text() for form in ("md", "csv")),
    ):
        assert not re.search(r"\b(None|nan|NaN|inf|Infinity)\b|<td>\s*</td>", text.replace('class="why"></td>', ""))


def test_a_figure_over_a_duration_of_zero_is_not_known(golden_run: Path) -> None:
    recorded(golden_run, at_once)
    render(golden_run)
    row = row_of(golden_run, "summary.json")
    assert row["output_token_throughput"] is None and row["request_throughput"] is None


def test_a_cell_without_a_result_took_no_known_time(golden_run: Path) -> None:
    recorded(golden_run, few)
    render(golden_run)
    cases = ElementTree.parse(golden_run / "junit.xml").iter("testcase")
    assert [case.get("name") for case in cases if case.get("time") is None] == [CELL]


def test_why_a_cell_has_no_result_stands_under_the_table_of_the_terminal(golden_run: Path) -> None:
    assert recorded(golden_run, few).status == "failed"
    assert f"{CELL}: aiperf left records of 1 of 12 measured requests" in console_text(golden_run)


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_terminal_that_is_too_narrow_cuts_no_number(golden_run: Path, width: int) -> None:
    wide = [line.split() for line in console_text(golden_run, 100).splitlines()[:5]]
    narrow = console_text(golden_run, width)
    assert "…" not in narrow
    assert [line.split() for line in narrow.splitlines()[:5]] == wide


def test_the_names_of_a_run_directory_are_text_in_every_form(
    golden_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"b\xffd \x01 <script><b>&\"'")
    shutil.copytree(golden_run, odd)
    monkeypatch.chdir(odd)
    assert trtx(["report", "."]) == 0, capfd.readouterr().err
    assert json.loads(Path("summary.json").read_text())["run"] == "b\N{REPLACEMENT CHARACTER}d \x01 <script><b>&\"'"
    name = ElementTree.parse("junit.xml").getroot().get("name")
    assert name == "trtx bench b\N{REPLACEMENT CHARACTER}d  <script><b>&\"'"
    assert "<script><b>" not in Path("report.html").read_text()


def test_lengths_that_nobody_knows_are_a_dash(golden_run: Path) -> None:
    cell = next(one for one in read_cells(golden_run) if one.name == CELL)
    data = replace(cell, load=replace(cell.load, isl=None, osl=None, label="c1-data"))
    CELL_FILE.write(golden_run / "cells" / "data", data.to_json())
    render(golden_run)
    assert "None" not in console_text(golden_run) and f"c1 {MISSING}/{MISSING}" in console_text(golden_run)
    page = re.sub(r"<script>.*?</script>", "", (golden_run / "report.html").read_text(), flags=re.DOTALL)
    assert "None" not in page and f">{MISSING} / {MISSING}</button>" in page


def test_what_a_server_wrote_is_no_tag_in_markdown(golden_run: Path) -> None:
    cell = recorded(golden_run, failed)
    trial = replace(cell.trials[0], errors=(("HTTP 502 <img src=x> | gone", 12),))
    CELL_FILE.write(cell_directory(golden_run, CELL), replace(cell, trials=(trial,)).to_json())
    render(golden_run)
    assert "12 of 12 failed: HTTP 502 \\<img src=x> | gone" in (golden_run / "summary.md").read_text()


def test_a_cell_over_workers_has_no_figure_per_gpu(golden_run: Path) -> None:
    cell = next(one for one in read_cells(golden_run) if one.name == CELL)
    CELL_FILE.write(cell_directory(golden_run, CELL), replace(cell, device="gpu", device_count=1).to_json())
    render(golden_run)
    rows = json.loads((golden_run / "summary.json").read_text())["rows"]
    per_gpu = {figure.key("GPU") for figure in all_figures() if isinstance(figure, PerDevice)}
    assert per_gpu == {"output_token_throughput_per_gpu", "gpu_power_per_gpu"}
    assert [row["output_token_throughput_per_gpu"] is None for row in rows] == [False, True, True, True]
    assert [row["gpu_power_per_gpu"] for row in rows] == [None] * 4  # no GPU was read


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.000123, "0.000123"), (0.0123, "0.0123"), (0.123, "0.123"), (1.234, "1.23"), (12345.6, "12,346")],
)
def test_no_number_but_zero_is_shown_as_zero(value: float, text: str) -> None:
    assert number(value) == text

"""Each cell's validity, what speaks against it and what nobody checked, in every form of a report."""

from __future__ import annotations

import csv
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.noted_digests import note_digests, note_end
from tests.unit.report.shown_forms import console_text
from trtx.bench.judge.checks import ValidityLevel
from trtx.report import render
from trtx.report.charts import charts
from trtx.report.validity import not_checked

pytestmark = pytest.mark.slow

FORMS = ("summary.md", "summary.csv", "summary.json", "junit.xml", "report.html")
RESTARTED = "restarted during the measurement: decode-0"
LATE = "14 of 16 requests were in flight on average"
VALID: dict[str, Any] = {"level": "VALID", "reasons": [], "unchecked": []}


def against(name: str, level: str, sentence: str) -> dict[str, Any]:
    return {"level": level, "reasons": [{"name": name, "level": level, "sentence": sentence}], "unchecked": []}


INVALID, SUSPECT = against("restarts", "INVALID", RESTARTED), against("late client", "SUSPECT", LATE)


def unchecked(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {**VALID, "unchecked": [{"name": name, "why": why} for name, why in pairs]}


def judged(run: Path, by_cell: dict[str, dict[str, Any]], **others: object) -> None:
    """Gives cells another validity; those that are not named are VALID, and of their records it is known that they are
    what their trials left."""
    note_digests(run)
    for path in run.glob("cells/*/cell.json"):
        change(run, path.parent.name, validity=by_cell.get(path.parent.name, VALID), **others)


def change(run: Path, name: str, **fields: object) -> None:
    path = run / "cells" / name / "cell.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    note_end(run)


def cases(run: Path) -> dict[str, ElementTree.Element]:
    return {case.get("name") or "": case for case in ElementTree.parse(run / "junit.xml").getroot()}


def rows(run: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((run / "summary.json").read_text())["rows"]
    return {f"{row['topology']}-{row['load']}": row for row in found}


def test_every_form_says_why_a_cell_is_not_valid(golden_run: Path) -> None:
    judged(golden_run, {"agg-c2": INVALID, "disagg-c1": SUSPECT})
    render(golden_run)
    for name in FORMS:
        text = (golden_run / name).read_text(encoding="utf-8")
        for said in ("INVALID", RESTARTED, "SUSPECT", LATE, "VALID"):
            assert said in text, (name, said)
    told = " ".join(console_text(golden_run).split())
    assert f"INVALID agg-c2: restarts: {RESTARTED} SUSPECT disagg-c1: late client: {LATE} VALID: the other 2" in told


def test_a_row_for_a_terminal_is_marked_and_the_mark_explained(golden_run: Path) -> None:
    judged(golden_run, {"agg-c2": INVALID, "disagg-c1": SUSPECT})
    lines = console_text(golden_run).splitlines()
    loads = [line.split()[1] for line in lines if line.startswith(("agg ", "disagg "))]
    assert loads == ["c1", "c2!", "c1?", "c2"]
    assert "? SUSPECT, ! INVALID: see below." in " ".join(" ".join(lines).split())


def test_a_reason_keeps_its_own_level_in_a_cell_that_is_worse(golden_run: Path) -> None:
    both = {**INVALID, "reasons": INVALID["reasons"] + SUSPECT["reasons"]}
    judged(golden_run, {"agg-c2": both})
    render(golden_run)
    told = " ".join(console_text(golden_run).split())
    assert f"INVALID agg-c2: restarts: {RESTARTED} SUSPECT agg-c2: late client: {LATE}" in told
    assert f"- SUSPECT agg-c2: late client: {LATE}" in (golden_run / "summary.md").read_text()
    assert cases(golden_run)["agg-c2"].findtext("system-out") == (
        f"INVALID: restarts: {RESTARTED}\nSUSPECT: late client: {LATE}"
    )


def test_a_run_of_valid_cells_has_no_marks_and_one_line(golden_run: Path) -> None:
    judged(golden_run, {})
    text = console_text(golden_run)
    assert "?" not in text and "!" not in text and "VALID: all 4 cells" in text
    view = render(golden_run)
    assert view.is_clean
    assert '<p class="verdict ">4 cells, 48 requests, none failed</p>' in (golden_run / "report.html").read_text()
    assert "## Validity" not in (golden_run / "summary.md").read_text()


def test_an_invalid_cell_is_an_error_in_junit_and_a_suspect_one_is_told(golden_run: Path) -> None:
    judged(golden_run, {"agg-c2": INVALID, "disagg-c1": SUSPECT})
    view = render(golden_run)
    assert not view.is_clean
    suite = ElementTree.parse(golden_run / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "0", "1")
    error = cases(golden_run)["agg-c2"].find("error")
    assert error is not None and error.get("message") == f"INVALID: restarts: {RESTARTED}"
    suspect = cases(golden_run)["disagg-c1"]
    assert suspect.find("error") is None and suspect.findtext("system-out") == f"SUSPECT: late client: {LATE}"
    levels = {name: case.findall("properties/property")[0].get("value") for name, case in cases(golden_run).items()}
    assert levels == {"agg-c1": "VALID", "agg-c2": "INVALID", "disagg-c1": "SUSPECT", "disagg-c2": "VALID"}


def test_failed_requests_of_an_invalid_cell_are_one_case_that_says_both(golden_run: Path) -> None:
    judged(golden_run, {"agg-c2": INVALID})
    document = json.loads((golden_run / "cells" / "agg-c2" / "cell.json").read_text())
    trial = document["trials"][0] | {"status": "errors", "errors": [["boom", 3]]}
    figures = document["figures"] | {"request_count": 9, "error_request_count": 3}
    change(golden_run, "agg-c2", trials=[trial], figures=figures)
    render(golden_run)
    suite = ElementTree.parse(golden_run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    failure = cases(golden_run)["agg-c2"].find("failure")
    assert failure is not None
    assert failure.get("message") == f"3 of 12 failed: boom; INVALID: restarts: {RESTARTED}"


def test_an_invalid_cell_is_no_best_not_on_the_front_and_a_cross(golden_run: Path) -> None:
    judged(golden_run, {"agg-c1": INVALID, "agg-c2": INVALID})
    view = render(golden_run)
    drawn = charts(view, (64, 16))
    assert not next(line for line in drawn["pareto"]["data"] if line["name"] == "agg front")["x"]
    assert drawn["throughput"]["data"][0]["marker"]["symbol"] == ["x", "x"]
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    best = page[page.index('aria-label="Best of each topology"') : page.index('aria-label="Validity"')]
    assert "<h2>disagg</h2>" in best and "<h2>agg</h2>" not in best
    assert '<p class="verdict bad">2 of 4 cells INVALID: agg-c1, agg-c2</p>' in page


def test_the_headline_of_a_run_with_doubts_is_neither_good_nor_bad(golden_run: Path) -> None:
    judged(golden_run, {"agg-c1": SUSPECT})
    assert render(golden_run).is_clean
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    assert '<p class="verdict doubt">4 cells, 48 requests, none failed; 1 SUSPECT</p>' in page


def test_what_nobody_checked_is_one_line_for_each_reason_whatever_the_number_of_cells(golden_run: Path) -> None:
    unread = "GPUs were not read"
    everywhere = (("throttled GPU", unread), ("foreign GPU use", unread))
    judged(
        golden_run,
        {name: unchecked(*everywhere) for name in ("agg-c1", "disagg-c1", "disagg-c2")}
        | {"agg-c2": unchecked(*everywhere, ("steady", "too noisy"))},
    )
    view = render(golden_run)
    assert [str(one) for one in not_checked(view)] == [
        f"throttled GPU, foreign GPU use ({unread}): all cells",
        "steady (too noisy): agg-c2",
    ]
    markdown = (golden_run / "summary.md").read_text()
    assert markdown.count("not checked:") == 2 and markdown.count(unread) == 1
    assert "not checked: throttled GPU, foreign GPU use, steady (1 of 4 cells)" in console_text(golden_run)
    assert (golden_run / "report.html").read_text().count(unread) == 1
    assert rows(golden_run)["agg-c2"]["not_checked"] == "throttled GPU, foreign GPU use, steady"


def test_a_reason_with_other_figures_in_each_cell_is_one_line_with_an_example(golden_run: Path) -> None:
    names = ("agg-c1", "agg-c2", "disagg-c1")
    judged(golden_run, {name: unchecked(("steady", f"too noisy in {name}")) for name in names})
    view = render(golden_run)
    assert [str(one) for one in not_checked(view)] == [
        "steady (agg-c1: too noisy in agg-c1; 2 more in summary.json): agg-c1, agg-c2, disagg-c1"
    ]
    kept = json.loads((golden_run / "summary.json").read_text())["validity"]
    assert kept["disagg-c1"]["unchecked"] == [{"name": "steady", "why": "too noisy in disagg-c1"}]
    page = (golden_run / "report.html").read_text()
    assert all(f"too noisy in {name}" in page for name in names)


def test_a_cell_without_figures_has_no_level_rather_than_a_good_one(golden_run: Path) -> None:
    judged(golden_run, {})
    shutil.rmtree(golden_run / "cells" / "disagg-c2")
    view = render(golden_run)
    assert view.rows[-1].level is None and view.rows[0].level is ValidityLevel.VALID
    assert rows(golden_run)["disagg-c2"]["validity"] is None
    assert "disagg-c2" not in json.loads((golden_run / "summary.json").read_text())["validity"]
    with (golden_run / "summary.csv").open() as file:
        assert [row["validity"] for row in csv.DictReader(file)] == ["VALID", "VALID", "VALID", ""]
    (line,) = [one for one in (golden_run / "summary.md").read_text().splitlines() if one.startswith("| disagg | c2")]
    assert line.startswith("| disagg | c2 | – | not measured |")
    assert "VALID: agg-c1, agg-c2, disagg-c1\n" in console_text(golden_run)


@pytest.mark.parametrize("form", ["summary.md", "report.html", "junit.xml", "summary.json"])
def test_a_cell_with_fewer_trials_than_asked_says_so(golden_run: Path, form: str) -> None:
    judged(golden_run, {})
    change(golden_run, "agg-c1", trials_asked=3)
    view = render(golden_run)
    said = "1 of 3 trials measured; trtx bench --resume measures the rest"
    assert view.rows[0].status == "incomplete" and not view.is_clean
    assert said in (golden_run / form).read_text(encoding="utf-8")
    assert f"agg-c1: {said}\n" in console_text(golden_run)
    assert ElementTree.parse(golden_run / "junit.xml").getroot().get("errors") == "1"


def test_what_is_wrong_with_several_cells_in_one_way_is_one_line(golden_run: Path) -> None:
    judged(golden_run, {}, trials_asked=2)
    told = " ".join(console_text(golden_run).split())
    assert "agg-c1, agg-c2, disagg-c1, disagg-c2: 1 of 2 trials measured" in told and told.count("1 of 2") == 1
    render(golden_run)
    assert (golden_run / "report.html").read_text().count("1 of 2 trials measured") == 1


def test_the_table_fits_80_columns_with_marks_long_names_lengths_and_large_figures(golden_run: Path) -> None:
    long = {"throughput": 54321.0, "ttft": {"p50": 12345.6, "p90": 23456.7, "p99": 34567.8}}
    for path in golden_run.glob("cells/*/cell.json"):
        document = json.loads(path.read_text())
        document["topology"] = document["topology"].replace("disagg", "disagg-12p4d")
        of_length = {"isl": 32768, "osl": 1024} if document["load"]["concurrency"] == 2 else {}
        document["load"] |= {"concurrency": 1024, "label": f"c1024-i{of_length.get('isl', 64)}-o16"} | of_length
        document["figures"] |= {"request_count": 1024, "error_request_count": 12}
        document["figures"] |= {"output_token_throughput": long["throughput"]}
        document["figures"]["time_to_first_token"] |= long["ttft"]
        document["validity"] = INVALID
        path.write_text(json.dumps(document))
    text = console_text(golden_run)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "~34,568" in text and "54,321" in text

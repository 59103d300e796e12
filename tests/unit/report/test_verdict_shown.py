"""The verdict of a run wherever it is shown."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from judged_runs import a_run, change_cells, judged

from tests.unit.report.shown_forms import console_text
from trtx.bench import Cell
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.bench.judge.validity import Reason
from trtx.report import render
from trtx.runs.forms import VERDICT, RunVerdict

pytestmark = pytest.mark.slow

SLO = ["time_to_first_token:p50:le:1", "request_latency:p50:le:5000"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Slower than its baseline, and one bound is missed."""
    run = a_run(tmp_path / "run", slower=1.3)
    judged(run, baseline=str(a_run(tmp_path / "base")), max_regression="5%", slo=SLO)
    return run


def change(run: Path, **fields: object) -> None:
    """The first judgement."""
    found = VERDICT.read(run, RunVerdict)
    first = replace(found.judgements[0], **fields)  # type: ignore[arg-type]
    VERDICT.write(run, replace(found, judgements=(first, *found.judgements[1:])))


def test_the_terminal_has_a_line_a_judgement_in_80_columns(run: Path) -> None:
    lines = console_text(run).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["agg-c1", "inter_token_latency:p50"] and "regressed" in line for line in lines)
    assert any("1.300 (1.29" in line for line in lines)
    assert any("time_to_first_token:p50:le:1" in line and " ms missed" in line for line in lines)
    assert not any("request_error_rate" in line for line in lines)  # the table of cells has the failed requests
    assert "Baseline base, run base" in " ".join(" ".join(lines).split())


def test_the_longest_names_and_numbers_fit_80_columns_too(run: Path) -> None:
    longest = "output_token_throughput_per_user:p50:ge:1234567.89"
    change(run, cell="disagg-2p12d-r12.5-i16384-o2048", criterion=longest, value=1234567.89, unit="tokens/s/user")
    assert max(map(len, console_text(run).splitlines())) <= 80


def test_a_run_that_was_judged_by_failures_alone_and_passed_has_no_table(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    judged(run)
    assert "verdict" not in console_text(run) and "pass" not in console_text(run)


def test_a_doubt_is_told_once_a_cell_and_in_each_form(run: Path) -> None:
    for_all = tuple(replace(one, doubts=("the client was late",)) for one in VERDICT.read(run, RunVerdict).judgements)
    VERDICT.write(run, replace(VERDICT.read(run, RunVerdict), judgements=for_all))
    render(run)
    assert console_text(run).splitlines().count("agg-c1 SUSPECT: the client was late") == 1
    for name in ("summary.md", "report.html", "junit.xml"):
        assert "SUSPECT: the client was late" in (run / name).read_text(), name


def test_junit_has_a_case_for_each_judgement_and_its_numbers(run: Path) -> None:
    render(run)
    suite = ElementTree.parse(run / "junit.xml").getroot()
    judgements = VERDICT.read(run, RunVerdict).judgements
    counts = {name: sum(one.verdict is verdict for one in judgements) for name, verdict in (
        ("regressed", Verdict.REGRESSED), ("missed", Verdict.MISSED), ("no verdict", Verdict.NO_VERDICT),
    )}  # fmt: skip
    assert int(suite.get("tests") or 0) == len(suite) == 4 + len(judgements) == 4 + 4 * 6
    assert int(suite.get("failures") or 0) == counts["regressed"] + counts["missed"] == 4 * 4
    assert int(suite.get("errors") or 0) == counts["no verdict"] == 0
    case = next(one for one in suite if one.get("name") == "inter_token_latency:p50")
    assert case.get("classname") == "trtx.bench.agg-c1" and "of the baseline" in str(case[0].get("message"))
    assert sum(float(one.get("time") or 0) for one in suite) > 1  # the time of each cell once


def test_no_verdict_is_an_error_of_junit(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    judged(run, slo=["time_to_first_token:p99:le:5000"])
    render(run)
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("0", "4", "12")
    assert "p99 needs 662 requests" in str(next(iter(suite.iter("error"))).get("message"))


def cases(run: Path) -> dict[str, dict[str, ElementTree.Element]]:
    """By class name without ``trtx.bench.``, then by name, of what was rendered."""
    found: dict[str, dict[str, ElementTree.Element]] = {}
    for case in ElementTree.parse(run / "junit.xml").getroot():
        found.setdefault(str(case.get("classname")).removeprefix("trtx.bench."), {})[str(case.get("name"))] = case
    return found


def ends(case: ElementTree.Element) -> list[tuple[str, str]]:
    """How it ended, if not well, and the message."""
    return [(one.tag, str(one.get("message"))) for one in case if one.tag in ("failure", "error")]


@pytest.mark.parametrize("lost", ["not measured", "no result"])
def test_a_cell_without_a_result_is_an_error_as_is_each_of_its_judgements(tmp_path: Path, lost: str) -> None:
    run = a_run(tmp_path / "run")
    if lost == "not measured":
        (run / "cells" / "agg-c2" / "cell.json").unlink()
    else:
        change_cells(run, lambda cell: without_a_result(cell) if cell.name == "agg-c2" else cell)
    judged(run, slo=["request_latency:p50:le:5000"])
    render(run)
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("0", "3", "12")
    found = cases(run)
    told = [ends(case) for case in (found["agg"]["agg-c2"], *found["agg-c2"].values())]
    assert [[tag for tag, _ in one] for one in told] == [["error"]] * 3
    why = "not measured" if lost == "not measured" else "aiperf exited 1 without a result"
    assert all(why in message for one in told for _, message in one)


def without_a_result(cell: Cell) -> Cell:
    lost = replace(cell.trials[0], status="failed", figures=None, failure="aiperf exited 1 without a result")
    return replace(cell, trials=(lost,), figures=None, validity=None)


def at_level(cell: Cell, level: ValidityLevel) -> Cell:
    assert cell.validity is not None
    reason = Reason(level=level, name="restarts", sentence="decode-0 was started again")
    return replace(cell, validity=replace(cell.validity, level=level, reasons=(reason,)))


def test_an_invalid_cell_of_a_judged_run_is_an_error_of_its_own_and_a_suspect_one_shows(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    levels = {"agg-c1": ValidityLevel.INVALID, "agg-c2": ValidityLevel.SUSPECT}
    change_cells(run, lambda cell: at_level(cell, levels[cell.name]) if cell.name in levels else cell)
    judged(run)  # by failed requests alone, and there were none
    render(run)
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("0", "1", "8")
    found = cases(run)["agg"]
    assert ends(found["agg-c1"]) == [("error", "INVALID: restarts: decode-0 was started again")]
    assert ends(found["agg-c2"]) == []
    for name, level in levels.items():
        assert [one.get("value") for one in found[name].iter("property")] == [level.value]
        assert f"{level.value}: restarts: decode-0" in str(found[name].findtext("system-out"))


def test_failed_requests_that_a_limit_allows_fail_no_case_of_a_judged_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    change_cells(run, lambda cell: replace(cell, trials=(replace(cell.trials[0], status="errors"), *cell.trials[1:])))
    render(run)  # not judged: they are the cell's failure
    assert ElementTree.parse(run / "junit.xml").getroot().get("failures") == "4"
    judged(run)
    render(run)
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")


def test_markdown_and_page_have_the_reasons(run: Path) -> None:
    render(run)
    markdown = (run / "summary.md").read_text()
    assert "## Verdict" in markdown and "**missed**: 16 of 24 checks did not pass." in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| agg-c1 | inter_token_latency:p50 |"))
    assert row.count("|") == 6 and "all beyond the limit 1.05" in row
    page = (run / "report.html").read_text()
    section = page[page.index('aria-label="Verdict"') : page.index("</section>", page.index('aria-label="Verdict"'))]
    assert "all beyond the limit 1.05" in section and section.count("<tr><td>") == 24
    assert "16 of 24 checks did not pass" in page[: page.index("</header>")]


def test_what_a_server_wrote_ends_no_row_and_no_tag(run: Path) -> None:
    change(run, reason="HTTP 500 <script>alert(1)</script> | a\nb\x07")
    render(run)
    assert "<script>alert" not in (run / "report.html").read_text()
    row = next(line for line in (run / "summary.md").read_text().splitlines() if "alert(1)" in line)
    assert row.startswith("| agg-c1 |") and "\\| a b" in row
    ElementTree.parse(run / "junit.xml")


def test_the_summary_has_the_verdict_as_it_is_kept(run: Path) -> None:
    render(run)
    kept = json.loads((run / "verdict.json").read_text())
    assert json.loads((run / "summary.json").read_text())["verdict"] == {
        name: value for name, value in kept.items() if name != "schema_version"
    }


def test_in_what_the_run_differs_from_its_baseline_is_told(tmp_path: Path) -> None:
    def elsewhere(conditions: object) -> object:
        return replace(conditions, versions=conditions.versions | {"torch": "1.0"})  # type: ignore

    run = a_run(tmp_path / "run")
    judged(run, baseline=str(a_run(tmp_path / "base", conditions=elsewhere)), max_regression="5%")
    render(run)
    for name in ("summary.md", "report.html"):
        assert "versions.torch was 1.0 and is" in (run / name).read_text()
    assert "all passed" in (run / "summary.md").read_text()


def test_a_run_that_was_not_judged_has_no_section(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    render(run)
    assert (
        "Verdict" not in (run / "summary.md").read_text()
        and 'aria-label="Verdict"' not in (run / "report.html").read_text()
    )
    suite = ElementTree.parse(run / "junit.xml").getroot()
    assert [case.get("name") for case in suite] == ["agg-c1", "agg-c2", "disagg-c1", "disagg-c2"]


def test_a_value_that_nobody_knows_is_a_dash(run: Path) -> None:
    unknown = CheckResult(cell="agg-c1", criterion="request_latency:p50", verdict=Verdict.NO_VERDICT, reason="too few")
    found = VERDICT.read(run, RunVerdict)
    VERDICT.write(run, replace(found, judgements=(unknown,)))
    render(run)
    assert "| agg-c1 | request_latency:p50 | – | no verdict | too few |" in (run / "summary.md").read_text()

"""No verdict rests on figures of other records than lie there, and where nobody can tell it is said, once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from judged_runs import a_run, an_ab_run, compared, gated, judged, prepare

from tests.unit.report.noted_digests import note_end
from trtx.bench import read_cells
from trtx.bench.digests import digests_of
from trtx.bench.journal import Journal, TrialEnded
from trtx.bench.judge.judgement import Verdict
from trtx.bench.records import RECORDS_FILE
from trtx.cli.app import run as trtx
from trtx.errors import UsageError
from trtx.experiment import gate

pytestmark = pytest.mark.slow

Said = pytest.CaptureFixture[str]
RECORDS = Path("cells") / "agg-c2" / "trial-01" / RECORDS_FILE
CHANGED = "records of agg-c2 have changed since the measurement"
FILE = f"(agg-c2/trial-01/{RECORDS_FILE} has different content from when the trial ended)"
UNNOTED = "the journal has no SHA-256 of them from the end of their trial"


def noted(run: Path) -> Path:
    """As if each trial had noted what its records were as it ended."""
    for cell in read_cells(run):
        for trial in cell.trials:
            files = digests_of(run / "cells" / cell.name / trial.directory)
            ended = TrialEnded(cell=cell.name, trial=trial.number, aiperf_exit_code=0, restarted=(), files=files)
            Journal(run).note(ended)
    note_end(run)
    return run


def change(run: Path) -> None:
    """Leaves the records' size as it was."""
    text = (run / RECORDS).read_bytes()
    (run / RECORDS).write_bytes(text[:-3] + bytes([text[-3] ^ 1]) + text[-2:])


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``base`` and ``next``, whose trials noted their records, and ``older``, whose trials did not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    judged(a_run(Path("base")))
    noted(Path("base"))
    noted(a_run(Path("next")))
    judged(a_run(Path("older")))


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", "base", "next"],
        ["compare", "next", "base"],
        ["compare", "base", "next", "--max-regression", "5%"],
        ["compare", "base", "next", "--json"],
        ["baseline", "save", "base", "main"],
        ["report", "base"],
    ],
    ids=" ".join,
)
def test_a_run_whose_records_were_changed_is_refused_with_its_file_and_what_to_do(
    argv: list[str], capsys: Said
) -> None:
    assert trtx(argv) == 0
    shutil.rmtree("baselines", ignore_errors=True)
    capsys.readouterr()
    change(Path("base"))
    assert trtx(argv) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert CHANGED in sentence and FILE in sentence and sentence.endswith("trtx bench --resume base")
    assert not Path("baselines").exists()


def test_a_gate_refuses_such_a_baseline_before_anything_starts() -> None:
    change(Path("base"))
    with pytest.raises(UsageError, match=CHANGED):
        prepare(Path("next"), gated(Path("next"), baseline="base", max_regression="5%"))
    assert not Path("next/baseline.json").exists()


def test_cells_of_a_run_whose_records_were_changed_get_no_verdict_of_its_gate() -> None:
    asked = gated(Path("next"), baseline="base", max_regression="5%", slo=["time_to_first_token:p50:le:5000"])
    prepare(Path("next"), asked)
    assert gate.judge(Path("next"), asked).verdict is Verdict.PASS
    change(Path("next"))
    found = gate.judge(Path("next"), asked)
    assert (found.verdict, found.exit_code) == (Verdict.NO_VERDICT, 3)
    bad = {one.cell for one in found.judgements if one.verdict is Verdict.NO_VERDICT}
    assert bad == {"agg-c2"} and f"trial-01/{RECORDS_FILE}" in (found.sentence or "")


def test_so_do_the_arms_of_an_ab_run() -> None:
    run = noted(an_ab_run(Path("ab"), 1.0))
    assert all(metric.ratio for metric in compared(run).comparisons[0].metrics)
    change(run)
    without = {metric.cell for metric in compared(run).comparisons[0].metrics if metric.ratio is None}
    assert without == {"c2"}


def test_of_runs_that_noted_nothing_it_is_told_that_nobody_checked(capsys: Said) -> None:
    change(Path("older"))  # which nobody can know
    assert trtx(["compare", "base", "older", "--max-regression", "5%"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    told = "the metrics of older were not checked against its records (agg-c1, agg-c2, disagg-c1 and 1 more: "
    assert shown.count(told + UNNOTED) == 1 and "figures of base" not in shown
    assert trtx(["compare", "base", "older", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert [UNNOTED in one for one in found["records_unchecked"]] == [True]
    assert trtx(["compare", "base", "next", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["records_unchecked"] == []


def test_records_that_are_gone_are_not_checked(capsys: Said) -> None:
    (Path("next") / RECORDS).unlink()
    assert trtx(["compare", "base", "next"]) == 0
    told = f"the metrics of next were not checked against its records (agg-c2: trial-01/{RECORDS_FILE}"
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_baseline_says_whether_its_records_were_checked_as_it_was_saved(capsys: Said) -> None:
    for run in ("base", "older"):
        assert trtx(["baseline", "save", run, run]) == 0
    assert capsys.readouterr().out.count("were not checked against") == 1
    checked, unchecked = (json.loads(Path(f"baselines/{name}.json").read_text()) for name in ("base", "older"))
    assert checked["records_unchecked"] is None and UNNOTED in unchecked["records_unchecked"]
    del checked["records_unchecked"], checked["sha256"]  # as an older trtx saved it
    Path("baselines/base.json").write_text(json.dumps(checked))
    assert trtx(["baseline", "show", "base"]) == 0
    told = "the metrics of base were not checked against its records (it was saved before records were checked; its "
    told += "file has no SHA-256 of itself, as an older trtx wrote it)"
    assert told in " ".join(capsys.readouterr().out.split())


def test_the_verdict_of_a_gate_says_so_of_its_baseline_in_every_form(capsys: Said) -> None:
    judged(Path("next"), baseline="older", max_regression="5%")
    told = (
        f"the metrics of older were not checked against its records (agg-c1, agg-c2, disagg-c1 and 1 more: {UNNOTED}"
        "; other files: the journal has no SHA-256 of them from the end of the run)"
    )
    assert json.loads(Path("next/verdict.json").read_text())["baseline"]["records_unchecked"] == [told]
    note_end(Path("next"))
    assert trtx(["report", "next"]) == 0
    for form in ("summary.json", "summary.md", "report.html"):
        assert told in Path("next", form).read_text(), form

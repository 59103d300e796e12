"""``trtx report``, and the summary of a GitHub Actions step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judged_runs import a_run, judged

from trtx.cli.app import run as trtx
from trtx.cli.step_summary import VARIABLE, add_step_summary
from trtx.report import render

pytestmark = pytest.mark.slow

Said = pytest.CaptureFixture[str]


def test_a_run_is_rendered_again_with_the_verdict_that_it_has(tmp_path: Path, capsys: Said) -> None:
    run = a_run(tmp_path / "run")
    judged(run, slo=["time_to_first_token:p50:le:1"])
    assert trtx(["report", str(run)]) == 0  # whatever the verdict
    said = capsys.readouterr().out
    assert "missed" in said and said.splitlines()[-1] == str(run / "report.html")
    assert (run / "report.html").exists() and (run / "junit.xml").exists()
    assert trtx(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["exit_code"] == 1


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Said) -> None:
    assert trtx(["report", str(tmp_path)]) == 2
    assert "is not a run directory, it has no run.lock.yaml; expected one of trtx bench" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_summary_is_appended_to_that_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run")
    judged(run)
    render(run)
    step = tmp_path / "step.md"
    step.write_text("# before\n")
    monkeypatch.setenv(VARIABLE, str(step))
    add_step_summary(run)
    assert step.read_text() == "# before\n" + (run / "summary.md").read_text() + "\n"
    assert "## Verdict" in step.read_text()


def test_a_step_summary_that_can_not_be_written_is_told_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    run = a_run(tmp_path / "run")
    render(run)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no" / "such" / "file"))
    add_step_summary(run)
    assert (
        f"{VARIABLE} '{tmp_path}/no/such/file' can't be written (No such file or directory)" in capsys.readouterr().err
    )
    monkeypatch.delenv(VARIABLE)
    add_step_summary(run)
    assert capsys.readouterr().err == ""

"""Whether what lies in a run directory is what its figures follow from: checked on each render, said in every form."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.report.noted_digests import note_digests
from trtx.bench.digests import FOLLOWED, digests_of
from trtx.bench.intact import digests_in
from trtx.bench.journal import Journal, TrialEnded, TrialStarted, read_journal
from trtx.bench.stage_rows import STAGES_FILE
from trtx.cli.app import run as trtx
from trtx.report import render

pytestmark = pytest.mark.slow

FORMS = ("summary.md", "summary.csv", "summary.json", "junit.xml", "report.html")
TRIAL = Path("cells") / "agg-c2" / "trial-01"


OF_THE_RUN = [name for name in FOLLOWED if name != STAGES_FILE]  # it was measured before workers wrote rows


@pytest.fixture
def run(golden_run: Path) -> Path:
    """With an aiperf's log and readings too, all as their trials left them."""
    for trial in golden_run.glob("cells/*/trial-01"):
        (trial / "logs").mkdir()
        (trial / "logs" / "aiperf.log").write_text("nothing to tell\n")
        (trial / "readings.json").write_text('{"schema_version": 1, "readings": []}\n')
    note_digests(golden_run)
    return golden_run


def test_records_that_are_what_their_trials_left_are_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trtx(["report", str(run)]) == 0
    assert "records" not in capsys.readouterr().out.replace(str(run), "RUN")
    page = (run / "report.html").read_text()
    assert (
        "Load by aiperf. The records under cells/, from which metrics and validity are computed, are unchanged" in page
    )


def _cut(path: Path) -> None:
    os.truncate(path, 2000)


def _same_size(path: Path) -> None:
    text = path.read_bytes()
    path.write_bytes(text[:-2] + bytes([text[-2] ^ 1]) + text[-1:])


@pytest.mark.parametrize("name", OF_THE_RUN)
@pytest.mark.parametrize(
    ("change", "said"),
    [(_cut, "has 2,000 bytes, but had"), (_same_size, "has different content from when the trial ended")],
)
def test_a_file_that_was_changed_makes_its_cell_invalid_in_every_form_and_the_exit_code_2(
    run: Path, name: str, change: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run / TRIAL / name)
    assert trtx(["report", str(run)]) == 2
    shown = capsys.readouterr()
    told = f"trial-01/{name} {said}"
    assert f"INVALID agg-c2: records: {told}" in " ".join(shown.out.split())
    (sentence,) = shown.err.splitlines()
    assert sentence.startswith("trtx: records of agg-c2 have changed since the measurement")
    assert f"(agg-c2/{told}" in sentence and f"trtx bench --resume {run}" in sentence
    for form in FORMS:
        text = (run / form).read_text(encoding="utf-8")
        assert "INVALID" in text and told in text, form
    page = (run / "report.html").read_text()
    assert "are computed, have changed since the trials ended: agg-c2" in page
    assert "1 of 4 cells INVALID: agg-c2" in page
    rows = {
        (row["topology"], row["load"]): row["validity"]
        for row in json.loads((run / "summary.json").read_text())["rows"]
    }
    assert [key for key, level in rows.items() if level == "INVALID"] == [("agg", "c2")]


def test_json_is_printed_all_the_same_and_the_exit_code_says_that_it_is_of_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _cut(run / TRIAL / FOLLOWED[0])
    assert trtx(["report", str(run), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["validity"]["agg-c2"]["level"] == "INVALID"


def test_several_are_named_and_the_first_few_files_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in ("agg-c1", "disagg-c2"):
        for name in OF_THE_RUN:
            _same_size(run / "cells" / cell / "trial-01" / name)
    assert trtx(["report", str(run)]) == 2
    assert "records of agg-c1, disagg-c2 have changed" in capsys.readouterr().err


def test_records_that_are_gone_and_those_of_an_older_run_are_not_checked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / TRIAL / FOLLOWED[0]).unlink()
    assert trtx(["report", str(run)]) == 0, "a copy without them shows what they once gave"
    assert "not checked" in capsys.readouterr().out
    validity = json.loads((run / "summary.json").read_text())["validity"]
    assert validity["agg-c2"]["unchecked"][-1] == {"name": "records", "why": f"trial-01/{FOLLOWED[0]} gone"}
    assert "records" not in [one["name"] for one in validity["agg-c1"]["unchecked"]]
    assert "could not be checked for changes: agg-c2" in (run / "report.html").read_text()
    (run / "journal.jsonl").unlink()
    render(run)
    assert "could not be checked for changes: all cells" in (run / "report.html").read_text()


def test_a_trial_that_was_begun_again_has_the_digests_of_its_last_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    trial = tmp_path / "trial-01"
    trial.mkdir()
    (trial / FOLLOWED[0]).write_text("first")

    def end(*, noted: bool) -> None:
        files = digests_of(trial) if noted else None
        journal.note(TrialEnded(cell="agg-c1", trial=1, aiperf_exit_code=0, restarted=None, files=files))

    end(noted=True)
    first = digests_in(read_journal(tmp_path))
    assert first["agg-c1", 1] == digests_of(trial)
    journal.note(TrialStarted(cell="agg-c1", trial=1, argv=()))
    assert digests_in(read_journal(tmp_path)) == {}, "a killed run notes no end"
    (trial / FOLLOWED[0]).write_text("second")
    end(noted=True)
    assert digests_in(read_journal(tmp_path))["agg-c1", 1] == digests_of(trial) != first["agg-c1", 1]
    end(noted=False)
    assert digests_in(read_journal(tmp_path)) == {}


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    assert digests_of(tmp_path / "none") == {}
    (tmp_path / FOLLOWED[0]).mkdir()
    (tmp_path / FOLLOWED[2]).write_text("")
    assert [*digests_of(tmp_path)] == [FOLLOWED[2]]
    shutil.rmtree(tmp_path)
    assert digests_of(tmp_path) == {}

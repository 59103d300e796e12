"""``trtx baseline`` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judged_runs import a_run, judged

from trtx.cli.app import run as trtx

pytestmark = pytest.mark.slow

Said = pytest.CaptureFixture[str]


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that passed, in the directory that is worked in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    judged(a_run(Path("run")))
    return "run"


def test_a_baseline_is_saved_shown_promoted_superseded_and_removed(passed: str, capsys: Said) -> None:
    assert trtx(["baseline", "list"]) == 0 and "no baseline in baselines" in capsys.readouterr().out
    for name in ("one", "two"):
        assert trtx(["baseline", "save", passed, name]) == 0
        assert "candidate" in capsys.readouterr().out
        assert trtx(["baseline", "promote", name]) == 0
    assert "superseded" in capsys.readouterr().out
    assert trtx(["baseline", "show", "two"]) == 0
    shown = capsys.readouterr().out
    assert "verdict of its run: pass" in shown and '"cpu_cores"' in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert trtx(["baseline", "expire"]) == 0
    assert "nothing was removed; add --remove" in capsys.readouterr().out and Path("baselines/one.json").exists()
    assert trtx(["baseline", "expire", "--remove"]) == 0
    assert not Path("baselines/one.json").exists() and Path("baselines/two.json").exists()
    assert trtx(["baseline", "expire"]) == 0 and "nothing expires" in capsys.readouterr().out.splitlines()[-1]


def test_the_list_is_json_too(passed: str, capsys: Said) -> None:
    trtx(["baseline", "save", passed, "main", "--baseline-dir", "elsewhere"])
    capsys.readouterr()
    assert trtx(["baseline", "list", "--json", "--baseline-dir", "elsewhere"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["baselines"]
    assert (found["name"], found["state"], found["verdict"], len(found["cells"])) == ("main", "candidate", "pass", 4)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["keep"], ["keep", "promote"]),
        (["save", "run"], ["save lacks NAME", "trtx baseline save RUN NAME"]),
        (["promote"], ["promote lacks NAME"]),
        (["show", "a", "b"], ["'b' has no effect after trtx baseline show NAME"]),
        (["show", "../a"], ["'../a' can't be the name of a baseline"]),
        (["show", "main"], ["no baseline is called 'main'"]),
        (["save", "nothing", "main"], ["nothing is not a run directory"]),
        (["list", "--remove"], ["--remove has no effect with list"]),
        (["expire", "--older-than", "-1"], ["--older-than", "0"]),
        (["expire", "--older-than", "1e9"], ["--older-than"]),
        (["list", "--baseline-dir", "x" * 300], ["--baseline-dir"]),
        (["show", "x" * 300], ["can't be the name of a baseline"]),
        (["save", "x" * 300, "main"], ["xxx"]),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(
    argv: list[str], words: list[str], capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trtx(["baseline", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1 and not list(tmp_path.iterdir())
    for word in words:
        assert word in said

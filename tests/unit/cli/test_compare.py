"""``trtx compare`` as a person types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from examples import first_of
from judged_runs import NOISY, a_run, judged

from trtx.cli.app import run as trtx

pytestmark = pytest.mark.slow

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``base``, ``again``, ``slow`` and ``noisy``, and ``base`` as the baseline ``main``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    judged(a_run(Path("base")))
    a_run(Path("again"), slower=1.0005)
    a_run(Path("slow"), slower=1.3)
    a_run(Path("noisy"), trials=NOISY)
    assert trtx(["baseline", "save", "base", "main"]) == 0


def test_runs_and_baselines_are_shown_side_by_side(capsys: Said) -> None:
    capsys.readouterr()
    assert trtx(["compare", "main", "slow", "noisy"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("baseline:  main") == 2 and "candidate: slow" in shown
    line = next(line for line in shown.splitlines() if line.startswith("disagg-c2 inter_token_latency:p50"))
    assert "1.300 (1.29" in line
    assert "verdict" not in shown and "No condition is known to differ." in shown


@pytest.mark.parametrize(
    ("run", "code", "word"), [("again", 0, ""), ("slow", 1, "regressed"), ("noisy", 3, "no verdict")]
)
def test_with_a_limit_it_is_a_gate(run: str, code: int, word: str, capsys: Said) -> None:
    assert trtx(["compare", "main", run, "--max-regression", "5%"]) == code
    said = capsys.readouterr()
    assert word in said.err and said.err.count("\n") == (1 if code else 0)
    assert (word or "pass") in said.out


def test_all_of_it_is_json_too(capsys: Said) -> None:
    capsys.readouterr()
    assert trtx(["compare", "base", "slow", "--metrics", "request_latency:p50", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (found["baseline"], found["candidate"], len(found["metrics"])) == ("base", "slow", 4)
    first = found["metrics"][0]
    ratio = first["ratio"]
    assert ratio["estimate"] == pytest.approx(1.3) and ratio["low"] < 1.3 < ratio["high"] and first["verdict"] is None


def test_the_window_is_the_same_on_both_sides_and_told(capsys: Said) -> None:
    a_run(Path("late"), slower_when_steady=1.3)
    argv = ["compare", "main", "late", "--metrics", "request_latency:avg,output_token_throughput", "--window"]
    for window, ratio in (("whole", "1.000"), ("steady", "0.769")):
        capsys.readouterr()
        assert trtx([*argv, window]) == 0
        shown = capsys.readouterr().out
        line = next(line for line in shown.splitlines() if line.startswith("disagg-c2 output_token_throughput"))
        assert ratio in line
        assert ("over the steady part of each trial" in shown) == (window == "steady")
    assert trtx([*argv, "steady", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["window"] == "steady"
    assert trtx([*argv, "steady", "--max-regression", "5%"]) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["base"], ["is one run, and there is nothing to compare it with"]),
        (["base", "nothing"], ["'nothing' is not a run directory or file, and no baseline is called 'nothing'"]),
        (["base", "slow", "./base"], ["'./base' is the same run as 'base', so there is nothing to compare"]),
        (["main", "baselines/main.json"], ["'baselines/main.json' is the same run as 'main'"]),
        (["base", "base"], ["'base' is the same run as 'base'"]),
        (["main", "base"], ["'base' is the same run as 'main'"]),  # which was saved of it
        (["base", "slow/verdict.json"], ["'slow/verdict.json' does not exist; expected a run directory"]),
        (["base", "base/verdict.json"], ["'base/verdict.json' can't be read as a baseline", "name is missing"]),
        (["base", ""], ["a value of RUN... is empty, as an unset variable leaves it"]),
        (
            ["base", "slow", "--allow-different", "machine"],
            ["--allow-different has no effect without --max-regression"],
        ),
        (["base", "slow", "--metrics", "itl"], ["no metric is called 'itl'"]),
        (["base", "slow", "--max-regression", "5"], ["--max-regression 5: expected a percentage"]),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], words: list[str], capsys: Said) -> None:
    capsys.readouterr()
    assert trtx(["compare", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    for word in words:
        assert word in said


def test_values_over_devices_have_the_devices_as_their_unit(capsys: Said) -> None:
    capsys.readouterr()
    for name in ("output_token_throughput_per_worker", "output_token_throughput_per_device"):
        assert trtx(["compare", "base", "slow", "--metrics", name, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["comparisons"]
        assert {(one["metric"], one["unit"]) for one in found["metrics"]} == {(f"{name}:avg", "tokens/s/worker")}


def test_an_end_of_an_interval_is_never_zero(capsys: Said) -> None:
    a_run(Path("apart"), trials=(1.0, 9.0))
    capsys.readouterr()
    assert trtx(["compare", "base", "apart"]) == 0
    shown = capsys.readouterr().out
    assert "(<0.001–>999)" in shown and "0.000" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("argv", first_of(1, [["compare", "base", "apart"], ["report", "apart"]]))
def test_a_locale_without_a_letter_shows_it_by_its_number(argv: list[str]) -> None:
    a_run(Path("apart"), trials=(1.0, 9.0))
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "trtx", *argv]
    done = subprocess.run(command, env=ascii_only, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii() and (argv[0] != "compare" or b"(<0.001\\u2013>999)" in done.stdout)


def test_a_run_that_ended_before_a_cell_passes_no_gate(capsys: Said) -> None:
    shutil.rmtree("again/cells/disagg-c2")
    assert trtx(["compare", "base", "again"]) == 0
    assert "again has no such cell" in capsys.readouterr().out
    assert trtx(["compare", "again", "base"]) == 0
    assert "the baseline has no such cell" in capsys.readouterr().out
    assert trtx(["compare", "base", "again", "--max-regression", "5%"]) == 1
    said = capsys.readouterr()
    assert "disagg-c2" in said.err and "the cell has no result (it was not measured)" in said.err


def test_a_cell_that_a_run_was_not_asked_for_is_told_and_not_judged(capsys: Said) -> None:
    lock = Path("again/run.lock.yaml")
    asked = yaml.safe_load(lock.read_text())
    asked["load"] |= {"concurrency": [1], "cells": asked["load"]["cells"][:1]}
    lock.write_text(yaml.safe_dump(asked))
    for cell in Path("again/cells").glob("*-c2"):
        shutil.rmtree(cell)
    assert trtx(["compare", "base", "again", "--max-regression", "5%"]) == 0
    assert "Not judged: agg-c2, disagg-c2, which again was not asked to measure." in capsys.readouterr().out

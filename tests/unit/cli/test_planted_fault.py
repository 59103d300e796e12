"""A planted fault is refused by every verb but the one that tells of it, whatever else is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.cli.app import VERBS, _command, run
from trtx.config.planted_fault import VARIABLE

TAKES = {"eval parity"}


def _needed(verb: str) -> list[str]:
    """A word for each argument and each option that must be there, so that the command line is whole; an option where
    there is none and it is needed."""
    command: Any = _command(verb)
    words = ["list" for one in command.params if not str(one.opts[0]).startswith("-")]
    options = {option for one in command.params for option in one.opts}
    for one in command.params:
        words += [one.opts[0], "http://127.0.0.1:9"] if one.required and str(one.opts[0]).startswith("-") else []
    return words or (["--engine", "auto"] if "--engine" in options else ["--json"] if "--json" in options else [])


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in TAKES])
def test_every_other_verb_refuses_it_before_it_does_anything(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "swap-block:every=100,layer=0")
    assert run([*verb.split(), *_needed(verb)]) == 2
    told = capfd.readouterr()
    assert told.err == f"trtx: {VARIABLE} is set, which corrupts KV on purpose to test `trtx eval parity`; unset it\n"
    assert told.out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_its_help_is_shown_all_the_same(
    verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "swap-block:every=100,layer=0")
    assert run([*verb.split(), "--help"]) == 0
    assert "Usage" in capfd.readouterr().out


def test_the_one_that_takes_it_looks_at_its_value(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "what")
    assert run(["eval", "parity", "--model", "synthetic:tiny", "-o", str(tmp_path / "runs")]) == 2
    assert "expected a value such as swap-block:every=100,layer=0" in capfd.readouterr().err

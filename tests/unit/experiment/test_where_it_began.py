"""Relative paths of a run are looked up where it began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trtx.errors import UsageError
from trtx.experiment import directory
from trtx.experiment.directory import where_it_began
from trtx.runs.forms import LOCK


def begun(run_dir: Path, at: str | None) -> Path:
    run_dir.mkdir()
    LOCK.write(run_dir, {"provenance": {"directory": at}})
    return run_dir


def test_paths_begin_there_and_the_caller_stays_where_he_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    run_dir = begun(tmp_path / "run", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SSL_CERT_FILE", "authority.pem")
    with where_it_began(run_dir):
        assert Path.cwd() == tmp_path and os.environ["SSL_CERT_FILE"] == str(tmp_path / "here" / "authority.pem")
    assert Path.cwd() == tmp_path / "here"
    with where_it_began(begun(tmp_path / "older", None)):
        assert Path.cwd() == tmp_path / "here", "nobody knows where an older run began"


def test_a_directory_that_is_gone_is_refused_but_for_a_copy_of_the_lock(tmp_path: Path) -> None:
    run_dir = begun(tmp_path / "run", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="from where its relative paths are resolved"), where_it_began(run_dir):
        pass
    before = Path.cwd()
    with where_it_began(run_dir / LOCK.file, is_copy=True):
        assert Path.cwd() == before


@pytest.mark.parametrize(
    ("asked", "relative"),
    [
        ({"text": "own.txt"}, True),
        ({"topology": {"engine_configs": {"agg": "own.txt"}}}, True),
        ({"load": {"aiperf_args": ["--custom-endpoint", "own.txt"]}}, True),
        ({"topology": {"overrides": ["a=own.txt"]}}, True),
        ({"gate": {"save_baseline": "main", "baseline_dir": "baselines"}}, True),
        ({"gate": {"save_baseline": None, "baseline_dir": "baselines"}}, False),
        ({"text": "/etc/hostname"}, False),
        ({"model": "Qwen/Qwen3-8B", "tasks": ["gsm8k"], "limit": 3, "odd": "\0"}, False),
    ],
)
def test_where_a_run_began_is_kept_if_something_is_relative_to_it(
    asked: dict[str, Any], relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert any(directory._relative_paths(asked)) is relative

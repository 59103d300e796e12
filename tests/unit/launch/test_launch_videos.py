"""A machine without PyAV: what ``trtx serve`` says before it starts, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import first_of
from without_videos import pythonpath_without_pyav

pytestmark = pytest.mark.slow


def dry_run(directory: Path, model: str, *typed: str, engine: str = "torch") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtx", "serve", "--engine", engine, "--model", f"synthetic:{model}"]
    command += ["--port", "0", "--dry-run", *typed]
    environment = {**os.environ, "PYTHONPATH": pythonpath_without_pyav(directory), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_serve_says_that_videos_are_refused_where_nothing_decodes_them(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "tiny-qwen2.5-vl")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "requests with videos are refused: videos are decoded by PyAV" in said
    assert "pip install 'trtx[video]'" in said


@pytest.mark.parametrize(
    "typed", first_of(1, [["--max-videos", "1"], ["--max-video-frames", "4"], ["--max-video-s", "5"]]), ids=str
)
def test_a_limit_of_videos_is_refused_where_nothing_decodes_them(tmp_path: Path, typed: list[str]) -> None:
    done = dry_run(tmp_path, "tiny-qwen2.5-vl", *typed)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trtx: {typed[0]} has no effect without PyAV") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "typed", first_of(1, [["tiny-vl"], ["tiny"], ["tiny-qwen2.5-vl", "--max-videos", "0"]]), ids=str
)
def test_nothing_is_said_where_no_video_would_be_taken_anyway(tmp_path: Path, typed: list[str]) -> None:
    done = dry_run(tmp_path, *typed)
    assert done.returncode == 0, done.stderr
    assert "PyAV" not in done.stdout + done.stderr

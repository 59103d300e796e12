"""The summary of a GitHub Actions step: the file that ``GITHUB_STEP_SUMMARY`` names, to which Markdown is appended."""

from __future__ import annotations

import os
from pathlib import Path

from trtx.cli.sentences import tell

VARIABLE = "GITHUB_STEP_SUMMARY"


def add_step_summary(run_dir: Path) -> None:
    """Appends the run's ``summary.md`` where a step of GitHub Actions has one. A run's exit code never depends on it:
    what can't be written is told."""
    if not (path := os.environ.get(VARIABLE)):
        return
    try:
        text = (run_dir / "summary.md").read_text(encoding="utf-8")
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        tell(f"{VARIABLE} {path!r} can't be written ({error.strerror}); the summary is in {run_dir}")

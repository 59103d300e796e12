"""The summary of a GitHub Actions step: Markdown that is appended to the file in ``GITHUB_STEP_SUMMARY``."""

from __future__ import annotations

import os
from pathlib import Path

from trtx.cli.sentences import tell

VARIABLE = "GITHUB_STEP_SUMMARY"


def add_step_summary(run_dir: Path) -> None:
    """Appends the run's ``summary.md`` to the step summary if the command runs in GitHub Actions.

    A failed write is only reported; it never changes the exit code of the run.
    """
    if not (path := os.environ.get(VARIABLE)):
        return
    try:
        text = (run_dir / "summary.md").read_text(encoding="utf-8")
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        tell(f"{VARIABLE} {path!r} can't be written ({error.strerror}); the summary is in {run_dir}")

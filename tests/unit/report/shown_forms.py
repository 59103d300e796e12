"""The forms in which a run of ``trtx bench`` is shown, as text."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from trtx.report import console_table, read_run, render


def console_text(run: Path, width: int = 80) -> str:
    """The result table on a terminal without colours."""
    written = io.StringIO()
    Console(width=width, file=written).print(console_table(read_run(run)))
    return written.getvalue()


def rendered(run: Path) -> tuple[str, str, str]:
    """Renders the run. Returns the terminal's text, summary.md, and the page without its scripts."""
    render(run)
    page = re.sub(r"<script.*?</script>", "", (run / "report.html").read_text(encoding="utf-8"), flags=re.DOTALL)
    return console_text(run), (run / "summary.md").read_text(encoding="utf-8"), page

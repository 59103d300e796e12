"""docs/python.md: every snippet runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.strip().splitlines()[0])
def test_a_snippet_of_the_page_runs_as_it_stands(snippet: str, tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(snippet, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_has_snippets() -> None:
    assert len(SNIPPETS) >= 2

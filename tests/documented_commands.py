"""The commands that README, the quickstart and the guides tell a reader to paste, for the tests that run them.

A ``bash`` block is run as it stands. A comment ``<!-- test: REASON -->`` above a block says why it can't run here; such
commands are only parsed, as ``tests/unit/test_documents.py`` does with all commands of all pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "docs" / "quickstart.md", *(ROOT / "docs" / "guides").glob("*.md")])
BLOCK = re.compile(
    r"(?:^ *<!-- test: (?P<reason>[^>]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = {
    "installs", "needs a GPU", "needs several hosts", "needs a cluster", "needs an earlier run", "needs earlier runs",
    "needs a baseline that passed", "needs a model",
}  # fmt: skip
ANY_VERDICT = "any verdict"
"""A reason with which a block is run: what is measured decides between exit codes 0, 1 and 3, or 2 for a baseline that
varies too much for the limit."""


@dataclass(frozen=True)
class Command:
    """One command line of a page. ``reason``: why it is not run, or ``any verdict``."""

    page: Path
    line: str
    reason: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def is_run(self) -> bool:
        return self.reason not in NOT_RUN

    @property
    def serves(self) -> bool:
        return self.words[:2] == ["trtx", "serve"] and not {"--dry-run", "--help"} & set(self.words)


def commands_of(page: Path) -> Iterator[Command]:
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] != "bash":
            continue
        body = re.sub(rf"^{block['indent']}", "", block["body"], flags=re.MULTILINE)
        for line in _whole_lines(body):
            yield Command(page, line, block["reason"])


def _whole_lines(body: str) -> Iterator[str]:
    """The command lines of a block: a backslash or an open quote continues on the next line."""
    line = ""
    for part in re.sub(r"\\\n\s*", " ", body).splitlines():
        line = f"{line}\n{part}" if line else part
        if not line.strip() or line.strip().startswith("#"):
            line = ""
        elif line.count("'") % 2 == 0:
            yield line.strip()
            line = ""

"""docs/security.md names tests that exist, one or more for each claim of its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("## What checks each claim")[2]


def test_each_claim_has_tests_that_are_there() -> None:
    rows = [row for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE) if row[0] != "Claim"]
    assert len(rows) > 20
    for claim, named in rows:
        tests = re.findall(r"`(tests/[\w/.]+)::(\w+)`", named)
        assert tests, f"{claim}: name the test that checks it"
        for file, name in tests:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            found = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in found, f"{claim}: {file} has no {name}"

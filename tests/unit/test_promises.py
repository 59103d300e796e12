"""tests/README.md, which says what protects each promise, names files that exist, and every integration test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS / "README.md"
NAMED = set(re.findall(r"`((?:unit|integration|trtllm|gpu)(?:/[\w./]+)?)`", DOCUMENT.read_text(encoding="utf-8")))


def test_every_test_that_the_document_names_exists() -> None:
    assert NAMED
    gone = sorted(name for name in NAMED if not (TESTS / name).exists())
    assert not gone, f"{DOCUMENT} names tests that do not exist: {gone}; correct its table"


def test_the_document_names_every_integration_test() -> None:
    files = {str(path.relative_to(TESTS)) for path in (TESTS / "integration").rglob("test_*.py")}
    missing = sorted(file for file in files if not any(file == name or file.startswith(f"{name}/") for name in NAMED))
    assert not missing, f"no promise in {DOCUMENT} names {missing}; add each to the row of what it protects"


def test_a_promise_that_make_test_checks_names_files_that_make_test_runs() -> None:
    """A file that is marked ``proof`` as a whole protects nothing in ``make test``."""
    of_proof = re.compile(r"^pytestmark = \[?pytest\.mark\.proof\b", re.MULTILINE)
    rows = [row.split("|") for row in DOCUMENT.read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    wrong = {
        (row[1].strip(), name)
        for row in rows
        for name in re.findall(r"`([\w/]+\.py)`", row[2])
        if of_proof.search((TESTS / name).read_text(encoding="utf-8"))
    }
    assert not wrong, (
        f"{sorted(wrong)}: name a test that make test runs, or move the file to the last column of {DOCUMENT}"
    )

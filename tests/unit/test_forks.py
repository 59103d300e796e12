from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]

PASSES = """
import warnings

import pytest

@pytest.fixture(scope="session", autouse=True)
def made(tmp_path_factory):
    yield tmp_path_factory.mktemp("made")
    print("session fixture ended")

def test_one(tmp_path):
    warnings.warn("seen in the parent")

@pytest.mark.parametrize("number", [1, 2])
def test_two(number, made):
    assert made.is_dir()

def test_skipped():
    pytest.skip("not here")
"""
FAILS = """
def test_wrong():
    print("what it wrote")
    assert 1 + 1 == 3

def test_right():
    pass
"""
DIES = """
import os

def test_before():
    pass

def test_that_dies():
    os._exit(7)
"""


def test_forked_processes_report_what_each_test_did(tmp_path: Path) -> None:
    for name, text in (("passes", PASSES), ("fails", FAILS), ("dies", DIES), ("after", PASSES), ("more", PASSES)):
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "forks", "-p", "no:cacheprovider", "--forks", "2", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert re.search(r"\b2 failed, 11 passed, 3 skipped\b", run.stdout), run.stdout
    assert "what it wrote" in run.stdout and "assert (1 + 1) == 3" in run.stdout
    assert "test_dies.py did not finish: its process ended with 7 after test_dies.py::test_before" in run.stdout
    assert len(re.findall("UserWarning: seen in the parent", run.stdout)) == 3  # one of each file

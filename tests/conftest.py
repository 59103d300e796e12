"""What holds for the run of all tests."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ("forks",)

_WHOLE_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)\b(?!\()", re.MULTILINE)

# No deadlines: how long an example takes depends on the machine.
hypothesis.settings.register_profile("full", deadline=None)  # make proof: all examples of every property test
hypothesis.settings.register_profile("trtx", deadline=None, max_examples=15)  # make test
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10)  # make unit
hypothesis.settings.load_profile("trtx")

# Set before torch is imported, here and in all processes that tests start. They share the machine's cores: with two
# threads, transformers' generate() of a tiny model took seven times the CPU time on two busy cores.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of SIGHUP under nohup.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without garbage collections: modules and 10,000 tests stay to the end, and looking at them again and
    again is a fifth of what collecting costs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Tests make much that is gone by reference counts alone, and few circles.
        gc.set_threshold(20_000, 20, 50)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether ``-m`` leaves the whole file out, by the mark that stands in it, so that it is not imported. What those
    of ``make unit`` would import is 3 s of CPU."""
    if not collection_path.name.startswith("test_") or " or " in (expression := config.getoption("markexpr")):
        return None
    marked = _WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))
    return True if marked and f"not {marked[1]}" in expression.split(" and ") else None

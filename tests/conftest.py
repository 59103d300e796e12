"""What holds for the run of all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator

import hypothesis
import pytest

# How long an example takes is the machine's, and says nothing of the code.
hypothesis.settings.register_profile("trtx", deadline=None)
hypothesis.settings.load_profile("trtx")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of SIGHUP under nohup.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without garbage collections: modules and 3,000 tests stay to the end, and each of xdist's processes
    spends 3 of 14 s of CPU on looking at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()

"""SIGINT and SIGTERM as a flag."""

from __future__ import annotations

import os
import signal
import time

import pytest

from trtx.errors import Interrupted
from trtx.launch.interruption import Interruption, catch_signals


def test_a_signal_raises_nothing_until_someone_looks_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interruption = Interruption()
    with catch_signals(interruption):
        interruption.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as raised:
            interruption.check()
    assert raised.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_ctrl_c_that_arrives_twice_counts_once_and_a_later_one_is_a_second() -> None:
    interruption = Interruption()
    with catch_signals(interruption):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert not interruption.is_hurried
        time.sleep(0.35)  # past the 0.3 s within which two are one
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.is_hurried
    with pytest.raises(Interrupted) as raised:
        interruption.check()
    assert raised.value.exit_code == 130


def test_a_terminal_that_closes_asks_to_stop_and_nohup_is_left_alone() -> None:
    interruption = Interruption()
    with catch_signals(interruption):
        os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(Interrupted) as raised:
        interruption.check()
    assert raised.value.exit_code == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ignored = Interruption()
        with catch_signals(ignored):
            os.kill(os.getpid(), signal.SIGHUP)
        ignored.check()
    finally:
        signal.signal(signal.SIGHUP, before)

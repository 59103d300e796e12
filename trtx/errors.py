"""The errors that trtx raises deliberately, one class per exit code.

    TrtxError
    ├── GateError            1   a gate failed
    ├── UsageError           2   wrong flag, file, config, port in use, missing extra
    │   └── UnsupportedModel 2   a sound model that the embedded engine does not run
    ├── NoVerdictError       3   measured too little to say: cells, or the tokens of answers
    ├── LaunchError          4   a process did not start, or did not become ready
    ├── LoadGeneratorError   5   aiperf failed
    └── Interrupted        130   SIGINT (143: SIGTERM, 129: SIGHUP)

A message is one sentence with the value, the expected values, and the next step. Any other exception that reaches the
top level is a bug of trtx: it prints a traceback and exits with 70.
"""

from __future__ import annotations

import signal


class TrtxError(Exception):
    """The base class of every error whose message is meant for the user."""

    exit_code = 70


class GateError(TrtxError):
    exit_code = 1


class UsageError(TrtxError):
    exit_code = 2


class UnsupportedModel(UsageError):
    """The embedded engine does not support the model. No error was found in it, and tensorrt-llm may run it."""


class NoVerdictError(TrtxError):
    exit_code = 3


class LaunchError(TrtxError):
    exit_code = 4


class LoadGeneratorError(TrtxError):
    exit_code = 5


class Interrupted(TrtxError):
    """A signal asked trtx to stop. ``signal_number``: 2 (SIGINT), 15 (SIGTERM) or 1 (SIGHUP)."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number

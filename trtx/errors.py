"""The errors that trtx raises deliberately, one class per exit code. docs/reference/exit-codes.md shows them.

A message is one sentence with the value, the expected values, and the next step. Any other exception that reaches the
top level is a bug of trtx: it prints a traceback and exits with 70.
"""

from __future__ import annotations

import signal


class TrtxError(Exception):
    """The base class of every error whose message is meant for the user."""

    exit_code = 70


class GateError(TrtxError):
    """A gate failed: a request without a full answer, a missed bound, a regression, a lower score."""

    exit_code = 1


class UsageError(TrtxError):
    """A wrong option, file or config, a missing package, a port in use, or a full disk."""

    exit_code = 2


class UnsupportedModel(UsageError):
    """The embedded engine does not support the model. No error was found in it, and tensorrt-llm may run it."""


class NoVerdictError(TrtxError):
    """No verdict: too little was measured to decide."""

    exit_code = 3


class LaunchError(TrtxError):
    """A process did not start, or the topology did not become ready. For ``trtx doctor``: a check failed."""

    exit_code = 4


class LoadGeneratorError(TrtxError):
    """The load generator, aiperf, failed."""

    exit_code = 5


class Interrupted(TrtxError):
    """A signal asked trtx to stop. ``signal_number``: 2 (SIGINT), 15 (SIGTERM) or 1 (SIGHUP)."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number

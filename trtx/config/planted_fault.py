"""The environment variable that plants a KV fault on purpose, and the refusal by commands that don't support it.

Only ``trtx eval parity`` accepts it, and reports it. :mod:`trtx.torch_engine.kv_fault` defines its values.
"""

from __future__ import annotations

import os

from trtx.errors import UsageError

VARIABLE = "TRTX_FAULT"


def refuse_planted_fault() -> None:
    """Raises UsageError if the environment plants a fault: a command that does not report it must not run with it."""
    if VARIABLE in os.environ:
        raise UsageError(f"{VARIABLE} is set, which corrupts KV on purpose to test `trtx eval parity`; unset it")

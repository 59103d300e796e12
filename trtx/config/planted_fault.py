"""The variable that asks for a planted fault, and its refusal by whoever does not tell of one.

What it asks for is :mod:`trtx.torch_engine.kv_fault`'s business; ``trtx eval parity`` alone takes it.
"""

from __future__ import annotations

import os

from trtx.errors import UsageError

VARIABLE = "TRTX_FAULT"


def refuse_planted_fault() -> None:
    """Raises UsageError where the environment asks for a fault: nobody who does not say so may run with one."""
    if VARIABLE in os.environ:
        raise UsageError(f"{VARIABLE} is set, which corrupts KV on purpose to test `trtx eval parity`; unset it")

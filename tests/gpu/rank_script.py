"""What the scripts of ranks share: lines with the time, and the end of the script when a rank ends."""

from __future__ import annotations

import os
import sys
import time

BEGAN = time.monotonic()


def stage(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def end(error: Exception) -> None:
    print(f"a rank ended: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # a collective would wait for the other rank forever

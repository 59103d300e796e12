"""A child of the build, from inside: a job on stdin, progress and the reason of a failure on a pipe."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from trtx.build.progress import Phase
from trtx.build.store import is_disk_full
from trtx.errors import UsageError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
Tell = Callable[[Phase, int, int], None]


def run_job(work: Callable[[dict[str, Any], Tell], None]) -> None:
    """``main`` of a child: calls ``work`` with the job's fields and with what tells its progress.

    The kernel ends this process with its parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    fields = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as events:

        def say(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")

        try:
            work(fields, lambda phase, done, total: say({"phase": phase, "done": done, "total": total}))
        except Exception as error:
            traceback.print_exc()
            kind = "disk-full" if is_disk_full(error) else "usage" if isinstance(error, UsageError) else "crash"
            say({"error": kind, "text": str(error) if kind == "usage" else f"{type(error).__name__}: {error}"})
            sys.exit(1)

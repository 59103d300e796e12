"""The child process of a build: ``python -m trtx.build quantize|tensorrt <fd>``, with a job as JSON on stdin.

ModelOpt takes 20 to 35 s to import and runs for minutes. In its own process it can be ended at any time, and a crash
becomes an error message. The child writes one line of JSON to ``fd`` for each step of progress, and at the end the
error, if there was one. The kernel kills it when its parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

from trtx.build.progress import Phase
from trtx.build.quantize import QuantizeJob, quantize
from trtx.build.store import is_disk_full
from trtx.build.tensorrt import EngineJob, build_engine
from trtx.errors import UsageError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kind, fd = sys.argv[1:]
    fields = json.load(sys.stdin)
    with os.fdopen(int(fd), "w", buffering=1) as events:

        def say(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")

        def tell(phase: Phase, done: int, total: int) -> None:
            say({"phase": phase, "done": done, "total": total})

        try:
            if kind == "quantize":
                quantize(QuantizeJob(**fields), tell)
            else:
                build_engine(EngineJob(**fields), tell)
        except Exception as error:
            traceback.print_exc()
            reason = "disk-full" if is_disk_full(error) else "usage" if isinstance(error, UsageError) else "crash"
            say({"error": reason, "text": str(error) if reason == "usage" else f"{type(error).__name__}: {error}"})
            sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # the files are written; the interpreter's teardown of ModelOpt would take seconds (seen in 0.47)


if __name__ == "__main__":
    main()

"""``python -m trtx.bench.warm_host MODULE:FUNCTION NAME...``: a program that is imported once and run many times.

``NAME`` is a module that is imported too, or behind a minus one that is not there while all is imported.

Imports everything, writes a line ``{"ready": true}``, and then for each line ``{"argv": […], "log": PATH}`` on its
standard input forks a process that leads a session of its own, writes to the log, and calls the function as if started
with that ``sys.argv``. It answers ``{"pid": N}``, and when that process has ended ``{"exit": CODE}``, negative for a
signal. One runs at a time. When its standard input ends, so does the session of what still runs, and it itself.

It forks, as aiperf 0.13.0 does for its own services, so it must not start threads before: it only imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

FAILED = 70  # exit code of a program that raised where it should have exited


def main(entry: str, names: list[str]) -> int:
    # Standard output is the launcher's pipe: whatever a module prints as it is imported goes to the log.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, function = entry.partition(":")
    absent = [name.removeprefix("-") for name in names if name.startswith("-")]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: as if it was not installed
    for name in (module, *(name for name in names if not name.startswith("-"))):
        importlib.import_module(name)
    for name in absent:
        del sys.modules[name]
    gc.freeze()  # or the first collection in each fork would copy every page that holds an object
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            replies.close()
            _become(getattr(sys.modules[module], function), request)
        replies.write(json.dumps({"pid": pid}) + "\n")
        if (code := _wait(pid)) is None:
            return 0
        replies.write(json.dumps({"exit": code}) + "\n")
    return 0


def _become(program: Any, request: dict[str, Any]) -> NoReturn:
    code = FAILED
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = request["argv"]
        program()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int | None:
    """The exit code of ``pid``; None when standard input ended first, and its session was ended then."""
    watched = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([watched, sys.stdin.fileno()], [], [])
        if watched not in ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not lead its session yet
                os.killpg(pid, signal.SIGKILL)
            return None
    finally:
        os.close(watched)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

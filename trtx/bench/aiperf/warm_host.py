"""``python -m trtx.bench.aiperf.warm_host MODULE:FUNCTION NAME...`` imports a program once and runs it many times.

``NAME`` is a module that is imported too, or behind a minus one that is not there while all is imported.

Imports everything, writes a line ``{"ready": true}``, and then for each line ``{"argv": […], "log": PATH}`` on its
standard input forks a process that leads a session of its own, writes to the log, and calls the function as if started
with that ``sys.argv``. It answers ``{"pid": N}``, and when that process has ended ``{"exit": CODE}``, negative for a
signal. One runs at a time. When its standard input ends, so does the session of what still runs, and it itself.

Nothing that it starts can be left behind: a function is not called before the answer names its process, so that whoever
reads the answers can end its session should this process be killed, and the process dies with this one. SIGTERM ends it
while it imports, and does nothing once it takes calls: the end of its standard input is how it learns of the end then.

It forks, as aiperf 0.13.0 does for its own services, so it must not start threads before: it only imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

FAILED = 70  # exit code of a program that raised where it should have exited
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


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
    libc = ctypes.CDLL(None)
    # Blocked, not ignored: one that comes for a fork before it has taken the block away is kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        ours, its = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            replies.close()
            ours.close()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _become(getattr(sys.modules[module], function), request, its)
        its.close()
        ours.recv(1)  # it leads its session; nothing: it died first
        replies.write(json.dumps({"pid": pid}) + "\n")
        with ours, contextlib.suppress(OSError):  # somebody who read that has ended it already
            ours.send(b"1")
        if (code := _wait(pid)) is None:
            return 0
        replies.write(json.dumps({"exit": code}) + "\n")
    return 0


def _become(program: Any, request: dict[str, Any], host: socket.socket) -> NoReturn:
    code = FAILED
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        with host:
            host.send(b"1")
            if not host.recv(1):  # the host died before anybody was told of this process
                os._exit(FAILED)
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
                os.killpg(pid, signal.SIGKILL)
            return None
    finally:
        os.close(watched)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

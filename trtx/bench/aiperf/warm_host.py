"""``python -m trtx.bench.aiperf.warm_host MODULE:FUNCTION NAME...`` imports a program once and runs it many times.

Each ``NAME`` is a further module to import. ``-NAME`` hides a module from the imports, as if it were not installed.

After the imports, the process writes the line ``{"ready": true}``. Each line ``{"argv": […], "log": PATH}`` on standard
input starts a run: the process forks a child that leads its own session, writes to the log, and calls the function with
that ``sys.argv``. The process replies ``{"pid": N}``, and after the child's end ``{"exit": CODE}`` (negative for a
signal). Only one child runs at a time. When standard input ends, the process kills the running child's session and
exits.

No child is left behind. If this process is killed, the kernel kills the child too, and the reader of the replies can
end the child's session, because the child calls the function only after the reply with its pid. SIGTERM ends this
process during its imports and is blocked afterwards; then only the end of standard input ends the process.

The process forks, as aiperf 0.13.0 does for its services, so it must not start threads. It only imports modules.
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

FAILED = 70  # exit code if the program raised an exception other than SystemExit
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(entry: str, names: list[str]) -> int:
    # Standard output is the launcher's pipe, so send the output of imported modules to the log.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, function = entry.partition(":")
    absent = [name.removeprefix("-") for name in names if name.startswith("-")]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: as if it were not installed
    gc.disable()  # modules stay: scanning them took a seventh of the imports' time
    for name in (module, *(name for name in names if not name.startswith("-"))):
        importlib.import_module(name)
    for name in absent:
        del sys.modules[name]
    gc.freeze()  # otherwise the first collection in each fork would copy every page that holds an object
    gc.enable()
    libc = ctypes.CDLL(None)
    # Blocked, not ignored: a SIGTERM that reaches a fork before it unblocks the signal stays pending.
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
        ours.recv(1)  # the child leads its session now; an empty read means that it died first
        replies.write(json.dumps({"pid": pid}) + "\n")
        with ours, contextlib.suppress(OSError):  # the reader of the reply may have ended the child already
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
            if not host.recv(1):  # the host died before it reported this process
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
    """Waits for ``pid`` and returns its exit code.

    If standard input ends first, kills the child's session and returns None.
    """
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

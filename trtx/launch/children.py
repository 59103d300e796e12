"""One started process: its handle, its log, and how its end reads."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Protocol

from trtx.launch.environment import child_environment
from trtx.launch.processes import send, send_to_group
from trtx.topology import ProcessSpec

_TAIL_LINES = 12
_TAIL_BYTES = 16_384


class Child(Protocol):
    """What the supervisor needs of a running process; tests script it."""

    @property
    def pid(self) -> int: ...
    @property
    def exit_fd(self) -> int | None:
        """Readable once it has ended, to wake whoever waits; None after :meth:`poll` has seen the end."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""

    def terminate(self) -> None:
        """Asks the process itself to end: its engine must live on while it drains."""

    def kill_group(self) -> None:
        """Ends it and all in its process group at once. Works on a stopped process too."""


class RealChild:
    """A child in a session of its own, its output appended to its log file; no pipe to fill."""

    def __init__(self, spec: ProcessSpec) -> None:
        if spec.status_file is not None:
            spec.status_file.unlink(missing_ok=True)
        with spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                spec.argv,
                env=child_environment(os.environ, spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._exit_fd: int | None = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_fd(self) -> int | None:
        return self._exit_fd

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
        return code

    def terminate(self) -> None:
        if self._process.poll() is None:
            send(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        send_to_group(self.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """``exited 3``, or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def log_tail(path: Path) -> str:
    """The last lines of a log, read from its end: a log may be large."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])

"""A started process: its interface to the supervisor, its log, and the description of its exit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from trtx.launch.environment import child_environment
from trtx.launch.logs import Log
from trtx.launch.processes import send, send_to_group
from trtx.topology import ProcessSpec


class Child(Protocol):
    """The supervisor's interface to a running process. Tests implement it without a process."""

    @property
    def pid(self) -> int: ...
    @property
    def exit_fd(self) -> int | None:
        """File descriptor that becomes readable when the process has ended; None once :meth:`poll` has seen the end."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process is alive."""

    def terminate(self) -> None:
        """Sends SIGTERM to the process, but not to its group, because a worker needs its engine while it drains."""

    def kill_group(self) -> None:
        """Kills the process and its process group with SIGKILL, which works on stopped processes too."""

    @property
    def log(self) -> Log:
        """The process's output since its start."""


class RealChild:
    """A child process in its own session.

    Its output is appended to its log file, so there is no pipe that could fill up.
    """

    def __init__(self, spec: ProcessSpec, secrets: Mapping[str, str] = MappingProxyType({})) -> None:
        """``secrets``: additional environment variables, which are not part of the plan.

        Raises OSError if the start fails.
        """
        if spec.status_file is not None:
            with contextlib.suppress(OSError):  # a status file of another pid is ignored anyway
                spec.status_file.unlink(missing_ok=True)
        self._log = Log(spec.log_path)
        self._process = subprocess.Popen(
            spec.argv,
            env=child_environment(os.environ, {**spec.env, **secrets}),
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if spec.cpus:  # before the process starts threads, which take over its CPUs as its children do
            os.sched_setaffinity(self._process.pid, spec.cpus)
        self._exit_fd: int | None = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> Log:
        return self._log

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
    """The end of a process in words, such as ``exited 3`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"

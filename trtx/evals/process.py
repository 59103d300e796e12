"""The launcher's side of the session: a process that receives topologies and reports samples."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from trtx.errors import LaunchError, NoVerdictError, TrtxError, UsageError
from trtx.evals.messages import (
    Endpoint,
    EvalFailed,
    EvalJob,
    EvalProgress,
    TasksLoaded,
    TopologyScored,
    Up,
    from_line,
    to_line,
)

_MARKER = "TRTX_EVAL_LOG"  # environment variable that identifies a session by its log
_POLL_S = 0.1
_GRACE_S = 5.0


def marker(log_path: Path) -> str:
    """``NAME=value`` in the environment of the session that writes this log."""
    return f"{_MARKER}={log_path}"


class Session:
    """Runs ``python -m trtx.evals.session``. A context manager; the process has ended when the context is left."""

    def __init__(self, job: EvalJob, log_path: Path) -> None:
        self._job = job
        self._log_path = log_path
        self._unread = b""

    def __enter__(self) -> Self:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._events, theirs = os.pipe()
        try:
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trtx.evals.session", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs,),
                    start_new_session=True,  # Ctrl-C reaches only the launcher, which ends the session
                    env={**_environment(), _MARKER: str(self._log_path)},
                )
        finally:
            os.close(theirs)
        self._say(to_line(self._job))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if error is not None:
            self._process.kill()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._events)

    def wait_loaded(self, check: Callable[[], None]) -> TasksLoaded:
        """Waits until every task and dataset is loaded. ``check`` is called meanwhile and may raise.

        Raises UsageError with the session's message, or LaunchError that names its log.
        """
        while True:
            for message in self._messages(check):
                if isinstance(message, TasksLoaded):
                    return message

    def ask(self, endpoint: Endpoint, check: Callable[[], None], on_progress: Callable[[EvalProgress], None]) -> None:
        """Requests all unanswered samples from one topology. Returns once its scores are written.

        Raises the exceptions of ``check``, NoVerdictError if the server is gone, and LaunchError for a crash. In these
        cases the session is killed first, so that it writes no more samples when the run's digests are recorded.
        """
        self._say(to_line(endpoint))
        try:
            while True:
                for message in self._messages(check):
                    if isinstance(message, EvalProgress):
                        on_progress(message)
                    elif isinstance(message, TopologyScored):
                        return
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _messages(self, check: Callable[[], None]) -> list[Up]:
        """The messages since the last call; waits for a moment at most."""
        check()
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            if not selector.select(_POLL_S):
                return []
        data = os.read(self._events, 1 << 20)
        if not data:
            raise LaunchError(
                f"the lm-eval process ended with exit code {self._process.wait()}; its output is in {self._log_path}"
            )
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = [from_line(line.decode()) for line in lines]
        if failed := next((one for one in found if isinstance(one, EvalFailed)), None):
            raise _error(failed, self._log_path)
        return [one for one in found if isinstance(one, (TasksLoaded, EvalProgress, TopologyScored))]

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is dead; the next read reports it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _error(failed: EvalFailed, log: Path) -> TrtxError:
    if failed.kind == "usage":
        return UsageError(failed.text)
    if failed.kind == "gone":
        return NoVerdictError(failed.text)
    return LaunchError(f"the process that asks the tasks failed ({failed.text}); its output is in {log}")


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment

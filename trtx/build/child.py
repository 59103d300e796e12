"""Runs a child process of the build: forwards its progress, logs its output, and turns its failure into an error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtx.build.progress import BuildProgress, Listener
from trtx.errors import LaunchError, UsageError

_DOES = {"quantize": "quantizes the model", "tensorrt": "builds the TensorRT engine"}
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DiskFullError(Exception):
    """The child process ran out of disk space."""


def run_child(kind: str, job: Any, *, log: Path, lock_fd: int, on_progress: Listener) -> None:
    """Runs ``python -m trtx.build kind <fd>`` with ``job``, a dataclass, on stdin, until it ends.

    The child inherits ``lock_fd``, so the lock lasts as long as the child. Raises UsageError with the child's own
    message, DiskFullError, or, for a crash, LaunchError, which names ``log``. The child has always ended when this
    function returns or raises.
    """
    events, theirs = os.pipe()
    root = str(Path(__file__).resolve().parents[2])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    # A thread that loses its core to another process delays all others at the next barrier. With one thread for each of
    # four busy cores, calibration of a small model took 279 s instead of 26 s. trtx serve also leaves half the cores
    # free.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    failure: dict[str, str] = {}
    child: subprocess.Popen[bytes] | None = None
    try:
        with os.fdopen(events) as lines:
            try:
                with log.open("wb") as output, _signals_held_back():
                    child = subprocess.Popen(
                        [sys.executable, "-m", "trtx.build", kind, str(theirs)],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=(theirs, lock_fd),
                        start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child
                        env=environment,
                    )
            finally:
                os.close(theirs)
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(asdict(job)).encode())
                child.stdin.close()
            except BrokenPipeError:
                pass  # the child is already dead; its log has the reason
            for line in lines:
                event = json.loads(line)
                if "error" in event:
                    failure = event
                else:
                    on_progress(BuildProgress(**event))
        code = child.wait()
    finally:
        if child is not None:
            child.kill()
            child.wait()
    if code == 0:
        return
    if failure.get("error") == "usage":
        raise UsageError(failure["text"])
    if failure.get("error") == "disk-full":
        raise DiskFullError
    ended = f"ended with signal {-code}" if code < 0 else f"failed ({failure.get('text', f'exit code {code}')})"
    raise LaunchError(f"the process that {_DOES[kind]} {ended}; its output is in {log}")


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """A context manager that defers signals whose handlers may raise, so that none arrives between the start of a child
    and the assignment of its handle.

    A signal mask would not work: Python runs handlers in the main thread even if another thread received the signal,
    and the child would inherit the mask. Handlers, in contrast, are reset to the default in a child.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # handlers run only in the main thread
        before = {number: handler for number in _STOPPING if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])

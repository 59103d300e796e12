"""Runs a child of the build to its end: its progress is passed on, its output goes to a log, its end is a sentence."""

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

from trtx.build.progress import Listener, Progress
from trtx.errors import LaunchError, UsageError

_DOES = {"quantize": "quantizes the model", "tensorrt": "builds the TensorRT engine"}
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DiskFullError(Exception):
    """The child met a full disk."""


def run_child(kind: str, job: Any, *, log: Path, lock_fd: int, on_progress: Listener) -> None:
    """``python -m trtx.build kind <fd>`` with ``job``, a dataclass, on stdin, until it ends.

    ``lock_fd`` stays locked as long as it lives. Raises UsageError with the child's own sentence, DiskFullError, or
    LaunchError naming ``log`` for a crash. However it is left, the child is gone.
    """
    events, theirs = os.pipe()
    root = str(Path(__file__).resolve().parents[2])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    # Threads that lose their core to another process hold up all others at the next barrier: calibration of a small
    # model took 279 s instead of 26 with a thread for each of four busy cores. trtx serve leaves half of them free too.
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
                        start_new_session=True,  # Ctrl-C is for the parent, which ends the child
                        env=environment,
                    )
            finally:
                os.close(theirs)
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(asdict(job)).encode())
                child.stdin.close()
            except BrokenPipeError:
                pass  # dead already: its log says why
            for line in lines:
                event = json.loads(line)
                if "error" in event:
                    failure = event
                else:
                    on_progress(Progress(**event))
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
    """A signal whose handler may raise is handled when this is left, not between a child's start and its handle.

    Not by a mask: Python runs handlers in the main thread even where another thread took the signal, and a child would
    start with the mask. A handler is the default again in a child.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # handlers run in no other
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

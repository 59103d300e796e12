"""Writes a worker's ended requests to a file, in its own thread. Memory and disk use are bounded."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from trtx.worker.requests.stage_clock import EndedRequest

logger = logging.getLogger(__name__)

LARGEST_BYTES = 16 << 20
"""Size in bytes at which the file is renamed, with ``.1`` appended, and a new one begins."""
MOST_WAITING = 20_000
EVERY_SECONDS = 0.2
_USE_EVERY_SECONDS = 1.0


class HostUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """CPU time of a worker's process and of its engine's process so far, with the number of cores that they may use.

    ``waited_s``: how long their threads were ready to run and had no core; absent where the kernel does not count it.
    """

    worker: str
    at_ns: int
    cores: int
    cpu_s: float
    waited_s: float | None = None


class StageLog:
    """Takes rows from the event loop, and writes them within ``EVERY_SECONDS``.

    If rows come faster than they can be written, the oldest waiting ones are lost. If the file can't be written, the
    worker logs it once and serves on.
    """

    def __init__(self, path: Path, worker: str, engine_pids: Iterable[int] = ()) -> None:
        """``engine_pids``: the processes of the engine, besides this one."""
        self._path, self._worker, self._pids = path, worker, {os.getpid(), *engine_pids}
        self._waiting: deque[EndedRequest] = deque(maxlen=MOST_WAITING)
        self._news, self._closed = threading.Event(), threading.Event()
        self._file: BinaryIO | None = None
        self._has_failed = False
        self._used_at = 0.0
        self._thread = threading.Thread(target=self._run, name="ended-requests", daemon=True)
        self._thread.start()

    def put(self, row: EndedRequest) -> None:
        """Adds a row. Never blocks."""
        self._waiting.append(row)
        self._news.set()

    def close(self) -> None:
        """Writes the rows that wait, and ends the thread."""
        self._closed.set()
        self._news.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # While requests arrive, one row a second has the CPU time of the processes; an idle worker writes nothing.
            self._news.wait()
            self._news.clear()
            is_last = self._closed.wait(EVERY_SECONDS)
            rows: list[EndedRequest] = []
            with contextlib.suppress(IndexError):
                while True:
                    rows.append(self._waiting.popleft())
            try:
                self._write([*self._uses(), *rows])
            except OSError as error:
                if not self._has_failed:
                    logger.warning("%s can't be written (%s); the topology serves on without it", self._path, error)
                self._has_failed, self._file = True, None
        if self._file is not None:
            self._file.close()

    def _uses(self) -> Sequence[HostUse]:
        now = time.monotonic()
        if now - self._used_at < _USE_EVERY_SECONDS:
            return ()
        self._used_at = now
        cpu_s, cores, waited = 0.0, 0, [_waited_s(pid) for pid in self._pids]
        for pid in self._pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                cpu_s += times.user + times.system
                cores = max(cores, len(process.cpu_affinity()))
        waited_s = None if None in waited else sum(seconds or 0.0 for seconds in waited)
        return (HostUse(worker=self._worker, at_ns=time.time_ns(), cores=cores, cpu_s=cpu_s, waited_s=waited_s),)

    def _write(self, rows: Sequence[EndedRequest | HostUse]) -> None:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        self._file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        if self._file.tell() > LARGEST_BYTES:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))


def _waited_s(pid: int) -> float | None:
    """How long the threads of a process were ready to run and had no core; None if the kernel does not count it.

    The second number of ``schedstat`` is in ns (Linux's Documentation/scheduler/sched-stats.rst).
    """
    waited_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended in the meantime
                waited_ns += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return waited_ns / 1e9

"""Files of a worker that was killed go with the last of its processes, however long that one takes to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trtx.engine.api import remove_left
from trtx.worker.left_files import LeftFiles

CHILD = """
import sys, numpy as np
from pathlib import Path
from trtx.ipc.shared_tensor import share
print(share(np.zeros(4, dtype=np.uint8), Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""
WORKER = """
import subprocess, sys
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], **pipes)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Pid of a process whose worker was killed and that has not ended yet, and a file of it."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as worker:
        assert worker.stdout is not None
        pid, path = worker.stdout.readline().split()
        os.kill(int(pid), signal.SIGSTOP)  # or it would end with its worker's end of their pipe
        worker.kill()
    try:
        yield int(pid), Path(path)
    finally:
        end(int(pid))


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def test_files_of_a_dead_worker_are_removed_once_its_last_process_has_ended(
    orphan: tuple[int, Path], tmp_path: Path
) -> None:
    pid, path = orphan
    left = LeftFiles(lambda: remove_left(tmp_path))
    await left.begin()
    try:
        assert path.exists(), "its process may still write one"
        end(pid)
        async with asyncio.timeout(20):
            while path.exists():
                await asyncio.sleep(0.01)
    finally:
        await left.close()


async def test_who_closes_waits_for_nobody(orphan: tuple[int, Path], tmp_path: Path) -> None:
    _, path = orphan
    left = LeftFiles(lambda: remove_left(tmp_path))
    await left.begin()
    async with asyncio.timeout(20):
        await left.close()
    assert path.exists()

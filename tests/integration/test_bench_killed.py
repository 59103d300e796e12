"""``kill -9`` of ``trtx bench`` while it measures something that it does not serve: the load ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import TRTX
from topology_clients import PACED, trtx_serve, wait_until

pytestmark = pytest.mark.proof


def load_of(bench: int) -> list[psutil.Process]:
    """aiperf's processes, once a call has its own: the one that has it imported, the call, and its services."""
    for host in psutil.Process(bench).children():
        with suppress(psutil.NoSuchProcess):  # it may end, or be a zombie, between two looks at it
            if "aiperf" in " ".join(host.cmdline()) and len(family := host.children(recursive=True)) > 4:
                return [host, *family]
    return []


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_killed_bench_leaves_no_load_and_no_scratch_behind(tmp_path: Path) -> None:
    # Short, as aiperf's sockets lie under it: bench takes /tmp itself in place of a long one.
    with (
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as scratch,
        trtx_serve(*PACED, "--model", "synthetic:tiny") as serve,
    ):
        plan = serve.wait_ready()
        command = [*TRTX, "bench", "--url", plan.url]
        load = ["--concurrency", "2", "--request-count", "20000", "--isl", "32", "--osl", "32"]
        load += ["--prompt-corpus", "random"]  # which aiperf makes in less time
        bench = subprocess.Popen(
            [*command, *load, "-o", str(tmp_path / "runs")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": scratch},
        )
        try:
            wait_until(lambda: load_of(bench.pid), 60, "aiperf and its processes started")
            assert any(Path(scratch).glob("trtx-aiperf-*"))
            load_processes = load_of(bench.pid)
            assert load_processes
        finally:
            bench.send_signal(signal.SIGKILL)
            bench.wait()
        wait_until(lambda: not any(map(lives, load_processes)), 15, "aiperf ended")
        wait_until(lambda: not any(Path(scratch).glob("trtx-*")), 15, "its scratch directory is gone")

"""Runs of ``trtx bench`` on real topologies, in which one thing is made slow on purpose."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from called import call

Meddling = Callable[["BenchProcess"], AbstractContextManager[None]]

TORCH = ("--engine", "torch", "--model", "synthetic:tiny-trained")
PACED = ("--engine", "paced", "--set", "paced_ttft_ms=40", "--set", "paced_itl_ms=10")
RANDOM = ("--prompt-corpus", "random")
SLOW_PROCESSOR = Path(__file__).with_name("slow_processor")
_SECONDS = 300.0
_RUNS = 3


class BenchProcess:
    """A running ``trtx bench``."""

    def __init__(self, process: subprocess.Popen[str], parent: Path) -> None:
        self._process, self.parent = psutil.Process(process.pid), parent

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its descendants whose command line has all of ``words``, and theirs."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    command = " ".join(child.cmdline())
                    if all(word in command for word in words):
                        found |= {one.pid: one for one in (child, *child.children(recursive=True))}
        return list(found.values())

    @property
    def records(self) -> int:
        """Number of ended requests that aiperf has written."""
        return sum(len(path.read_bytes().splitlines()) for path in self.parent.glob("*/cells/*/*/profile_export.jsonl"))


def slow_run(
    parent: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
    meddling: Meddling | None = None,
) -> Path:
    """Runs ``trtx bench`` and returns its run directory. ``through``: a command that executes what follows it.

    Other processes that take this machine's cores make the client and the workers slow as well. A run that says so of
    a cell is repeated. Skips the test if every run does.
    """
    for number in range(_RUNS):
        made = _one_run(parent / str(number), *arguments, variables=variables, through=through, meddling=meddling)
        rows = json.loads((made / "summary.json").read_text())["rows"]
        if not any("foreign CPU use" in row["validity_reasons"] for row in rows):
            return made
    pytest.skip(f"other processes used this machine's cores during {_RUNS} runs")


def _one_run(
    parent: Path,
    *arguments: str,
    variables: Mapping[str, str] | None,
    through: Sequence[str],
    meddling: Meddling | None,
) -> Path:
    parent.mkdir(parents=True)
    argv = [*through, sys.executable, "-m", "trtx", "bench", *arguments, "-o", str(parent)]
    with parent.with_suffix(".txt").open("w+") as output:
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(variables or {})}
        )
        bench = BenchProcess(process, parent)
        try:
            with nullcontext() if meddling is None else meddling(bench):
                code = process.wait(_SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        output.seek(0)
        assert code in (0, 3), output.read()
    (run_dir,) = parent.iterdir()
    return run_dir


def causes_of(run_dir: Path) -> dict[str, list[str]]:
    """The names of the causes that ``trtx explain`` prints, by cell. Each has a number as evidence."""
    done = call("explain", str(run_dir), "--json")
    assert done.code == 0, done.err
    cells: list[dict[str, Any]] = json.loads(done.out)["cells"]
    for cell in cells:
        assert cell["unknown"] is None, cell
        assert all(any(mark.isdigit() for mark in cause["evidence"]) for cause in cell["causes"])
    return {cell["cell"]: [cause["name"] for cause in cell["causes"]] for cell in cells}


def stopped_client(stopped_s: float, running_s: float) -> Meddling:
    """While requests are measured, the load generator runs for ``running_s`` and then stands for ``stopped_s``."""

    @contextlib.contextmanager
    def meddling(bench: BenchProcess) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set() and not bench.records:
                ended.wait(0.2)
            clients = bench.processes("aiperf")
            while not ended.is_set():
                _signal(clients, signal.SIGSTOP)
                ended.wait(stopped_s)
                _signal(clients, signal.SIGCONT)
                ended.wait(running_s)
            _signal(clients, signal.SIGCONT)

        with _thread(work, ended):
            yield

    return meddling


def on_one_core(*words: str) -> Meddling:
    """The processes of the topology whose command line has ``words``, and their children, run on one core."""

    @contextlib.contextmanager
    def meddling(bench: BenchProcess) -> Iterator[None]:
        ended = threading.Event()
        core = min(os.sched_getaffinity(0))

        def work() -> None:
            while not ended.wait(0.2) and not bench.records:
                for process in bench.processes(*words):
                    with contextlib.suppress(psutil.Error, OSError):
                        for thread in process.threads():
                            os.sched_setaffinity(thread.id, {core})

        with _thread(work, ended):
            yield

    return meddling


@contextlib.contextmanager
def _thread(work: Callable[[], None], ended: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def slow_link(mbit_s: int) -> tuple[str, ...]:
    """A command that executes what follows it on a loopback of its own, which carries ``mbit_s``.

    Its processes may not read each other's memory, as in a container whose seccomp profile forbids it, so that KV goes
    over the loopback too.
    """
    script = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {mbit_s}mbit burst 512k limit 16m && "
        f'exec "{sys.executable}" "{__file__}" "$@"'
    )
    return ("unshare", "--net", "sh", "-c", script, "sh")


def lacks_slow_link() -> str | None:
    """Why :func:`slow_link` can't be used here; None if it can."""
    if os.geteuid() != 0 or shutil.which("tc") is None or os.uname().machine != "x86_64":
        return "a slow link needs root, tc of iproute2, and x86_64"
    tried = subprocess.run([*slow_link(100), "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no slow link can be made: {tried.stderr.strip()}"


_PROCESS_VM_READV, _EPERM = 310, 1  # on x86_64


def _forbid_reading_memory() -> None:
    """Lets ``process_vm_readv`` fail in this process and its children: see seccomp(2)."""
    load, jump, give = 0x20, 0x15, 0x06  # of classic BPF
    filter_errno, filter_allow = 0x0005_0000 | _EPERM, 0x7FFF_0000
    code = [(load, 0, 0, 0), (jump, 0, 1, _PROCESS_VM_READV), (give, 0, 0, filter_errno), (give, 0, 0, filter_allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, mode_filter, described, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def with_recorded_gpus(run_dir: Path, copied_to: Path, gpus: Sequence[Mapping[str, Any]]) -> Path:
    """A copy of a run, with recorded readings of GPUs in the readings of each trial."""
    copied = Path(shutil.copytree(run_dir, copied_to))
    for path in copied.glob("cells/*/*/readings.json"):
        document = json.loads(path.read_text())
        for number, reading in enumerate(document["readings"]):
            reading["gpus"] = [gpus[number % len(gpus)]]
        path.write_text(json.dumps(document))
    return copied


if __name__ == "__main__":
    _forbid_reading_memory()
    os.execvp(sys.argv[1], sys.argv[1:])

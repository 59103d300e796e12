"""Frontend and workers as real processes, started as the launcher starts them, for the tests of both."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

T = TypeVar("T")
# For all that is asked: a client of its own reads the system's certificates, 30 ms of CPU in every turn of a poll.
# Connections end with their answers, or a server that drains would wait for them.
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
START_SECONDS = 90.0
TRTX = (sys.executable, "-c", "from trtx.cli.app import main; main()")
"""The command ``trtx``, with this interpreter."""


def until(what: str, ask: Callable[[], T | None], *, seconds: float = START_SECONDS, every: float = 0.02) -> T:
    """The first answer of ``ask`` that is neither None nor False; AssertionError after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        time.sleep(every)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def freeze(pid: int) -> None:
    """SIGSTOP, and back once every thread stands still: the signal's sender returns before that."""
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        states = (stat.read_bytes().rpartition(b")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
        return all(state == b"T" for state in states)

    until(f"process {pid} stands still", stands, every=0.001)


def _shuffled(ports: range) -> Iterator[int]:
    """This test process's share of them, in random order, over and over. It is known at the first draw: the module is
    imported before processes are forked."""
    runner = int(os.environ.get("PYTEST_FORK", "0"))
    runners = int(os.environ.get("PYTEST_FORKS", "1"))
    share = ports[runner::runners]
    yield from itertools.cycle(random.sample(share, len(share)))


PORTS = _shuffled(range(10_000, 15_000))
ADJACENT_PORTS = 32  # as many as the processes of a host's share want, and more
# Not 8000, which test_documented_commands.py leaves to `trtx serve`.
FIRST_PORTS = _shuffled(range(8_000 + ADJACENT_PORTS, 10_000 - ADJACENT_PORTS, ADJACENT_PORTS))


def free_port() -> int:
    """A port that nothing listens on now, and that nobody draws before its process does.

    Below the ports that trtx's launcher draws (15,000 on) and those that the system gives to connections, and below
    32,768, as Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed 16-bit number. Each of the processes that run tests has
    its own share of them, and draws none of it again before it has drawn all: two draws made before either is bound
    never meet.
    """
    for port in itertools.islice(PORTS, 5_000):
        if _is_free(port):
            return port
    raise AssertionError("no free port from 10,000 to 14,999")


def free_first_port() -> int:
    """The first of :data:`ADJACENT_PORTS` that nothing listens on, and that :func:`free_port` never gives."""
    for first in itertools.islice(FIRST_PORTS, 100):
        if all(map(_is_free, range(first, first + ADJACENT_PORTS))):
            return first
    raise AssertionError(f"no {ADJACENT_PORTS} free ports side by side from 8,032 to 9,999")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass
class Child:
    """One started process: its log is a file, so that a failure can show it."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    status_path: Path | None = None
    system_port: int = 0

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def status(self) -> dict[str, Any]:
        if self.status_path is None or not self.status_path.exists():
            return {}
        result: dict[str, Any] = json.loads(self.status_path.read_text(encoding="utf-8"))
        return result

    def end(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} did not end within {seconds:g} s:\n{self.log()[-3000:]}") from None


@dataclass
class Topology:
    """A frontend and its workers over one discovery directory, all on loopback."""

    directory: Path
    model: Path
    model_name: str = "tiny"
    children: list[Child] = field(default_factory=list)
    extra_environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    broker: tuple[str, str] = field(
        default_factory=lambda: (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "ETCD_", "NATS_"))}
        xsub, xpub = self.broker
        return (
            inherited
            | {
                "DYN_DISCOVERY_BACKEND": "file",
                "DYN_FILE_KV": str(self.directory / "kv"),
                "DYN_REQUEST_PLANE": "tcp",
                "DYN_EVENT_PLANE": "zmq",
                "DYN_TCP_RPC_HOST": "127.0.0.1",
                "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
                "DYN_SYSTEM_HOST": "127.0.0.1",
                "DYN_ZMQ_BROKER_URL": f"xsub={xsub} , xpub={xpub}",
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
                "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
                "DYN_LOG": "info",
                "HF_HUB_OFFLINE": "1",
                "UCX_NET_DEVICES": "lo",
                "CUDA_VISIBLE_DEVICES": "",
            }
            | self.extra_environment
        )

    def spawn(
        self, name: str, argv: list[str], environment: dict[str, str] | None = None, through: tuple[str, ...] = ()
    ) -> Child:
        """Python with ``argv``. ``through``: a command that executes what follows it, in the same process."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*through, sys.executable, *argv],
                env=self.environment() | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def start_frontend(self, *flags: str) -> Child:
        xsub, xpub = self.broker
        argv = ["-m", "trtx.frontend", "--http-port", str(self.port), "--broker-xsub", xsub, "--broker-xpub", xpub]
        return self.spawn("frontend", [*argv, *flags])

    def start_worker(
        self,
        name: str = "agg-0",
        *,
        role: str = "agg",
        engine: str = "paced",
        flags: tuple[str, ...] = (),
        **llm_args: Any,
    ) -> Child:
        config = self.directory / f"{name}.yaml"
        config.write_text(yaml.safe_dump(llm_args), encoding="utf-8")
        status = self.directory / f"{name}.status.json"
        argv = ["-m", "trtx.worker", "--role", role, "--engine", engine, "--model", str(self.model)]
        argv += ["--served-model-name", self.model_name, "--engine-config", str(config), "--name", name]
        port = free_port()
        child = self.spawn(name, [*argv, "--status-file", str(status), *flags], {"DYN_SYSTEM_PORT": str(port)})
        child.status_path, child.system_port = status, port
        return child

    def wait_ready(self, **workers: int) -> None:
        """``workers``: expected count by Dynamo's worker type, such as ``prefill=1, decode=1``."""
        until(f"ready with {workers}", lambda: self._ready(workers))

    def _ready(self, workers: dict[str, int]) -> bool:
        for child in self.children:
            if child.process.poll() is not None:
                raise AssertionError(f"{child.name} ended with {child.process.returncode}:\n{child.log()[-3000:]}")
        try:
            answer = HTTP.get(f"{self.url}/v1/models/{self.model_name}/ready", timeout=5)
        except httpx.TransportError:
            return False
        if answer.status_code != 200 or not answer.json().get("ready"):
            return False
        found: dict[str, int] = {}
        for namespace in answer.json()["namespaces"].values():
            for kind, entry in namespace["worker_types"].items():
                found[kind] = found.get(kind, 0) + entry["workers"]
        return all(found.get(kind, 0) == count for kind, count in workers.items())

    def stop(self) -> None:
        """Ends what still runs, workers first; a child that has to be killed is a failure."""
        stuck = []
        for child in reversed(self.children):
            try:
                child.end()
            except AssertionError as error:
                stuck.append(str(error))
        assert not stuck, "\n".join(stuck)


@contextlib.contextmanager
def topology(directory: Path, model: Path) -> Iterator[Topology]:
    """Stops everything at the end, whatever happened; the logs of a failed test are in ``directory``."""
    running = Topology(directory, model)
    try:
        yield running
    finally:
        running.stop()

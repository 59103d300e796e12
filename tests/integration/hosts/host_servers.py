"""etcd and NATS from the distribution's packages: one process each, on one host, which is killed and comes again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from namespaces import Host
from processes import until

ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
NATS_PORT = 4222
# Above a prompt of 128 Ki tokens: with the server's own 1 MiB one that is longer costs its worker (Dynamo 1.4.2).
MAX_PAYLOAD_BYTES = 8 << 20
_ETCD_RESTART_S = 20.0


@dataclass
class Service:
    """One server. What it keeps on disk outlives its process, as it does on a machine."""

    host: Host
    directory: Path
    argv: tuple[str, ...]
    answers: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.host.entered():
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            until(f"an answer of {self.argv[0]}", self._is_up, seconds=_ETCD_RESTART_S, every=0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.argv[0]} ended with {self.process.returncode}: {self.log()[-2000:]}"
        with contextlib.suppress(OSError):
            return self.answers()
        return False


def etcd(host: Host, directory: Path) -> Service:
    client, peer = f"http://{host.address}:{ETCD_PORT}", f"http://{host.address}:{ETCD_PEER_PORT}"
    argv = ["etcd", "--name", host.name, "--data-dir", os.fspath(directory / "data"), "--log-level", "warn"]
    argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
    argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    argv += ["--initial-cluster", f"{host.name}={peer}"]

    def answers() -> bool:
        with urllib.request.urlopen(f"{client}/health", timeout=2) as answer:
            return b'"true"' in answer.read()

    return Service(host, directory, tuple(argv), answers)


def nats(host: Host, directory: Path) -> Service:
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "nats.conf"
    config.write_text(f"host: {host.address}\nport: {NATS_PORT}\nmax_payload: {MAX_PAYLOAD_BYTES}\n", encoding="utf-8")

    def answers() -> bool:
        with socket.create_connection((host.address, NATS_PORT), timeout=2) as connection:
            return connection.recv(5) == b"INFO "

    return Service(host, directory, ("nats-server", "-c", os.fspath(config)), answers)

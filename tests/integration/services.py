"""A real etcd and a real NATS on loopback, started by a test and ended by it, by pid.

From the distribution's packages etcd-server and nats-server; `.ci/run` installs both. A test that lacks one is skipped
and says which package it wants; with TRTX_NEEDS_SERVICES=1, as `.ci/run` sets it, it fails instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import free_port, until

_END_SECONDS = 10.0
_EITHER_SIDE = "serverAuth,clientAuth"


def needs(program: str, package: str) -> str:
    """Its path. Skips the test, or fails it where nothing may be missing."""
    if (found := shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")) is not None:
        return found
    why = f"{program} is not installed; apt-get install --no-install-recommends {package}"
    if os.environ.get("TRTX_NEEDS_SERVICES") == "1":
        pytest.fail(why)
    warnings.warn(f"NOT TESTED: {why}", stacklevel=2)  # pytest -q shows warnings, and no skips
    pytest.skip(why)


@dataclass
class Service:
    """One server over all its lives: the same addresses, the same data."""

    argv: list[str]
    port: int
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    hosts: tuple[str, ...] = field(default=("127.0.0.1",))

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        until(f"{self.argv[0]} listens, see {self.log_path}", self._listens)

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log_path.read_text(errors="replace")[-3000:]
        with contextlib.suppress(OSError), socket.create_connection((self.hosts[0], self.port), timeout=1):
            return True
        return False


@dataclass
class EtcdService(Service):
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.hosts[0]}:{self.port}"


@contextlib.contextmanager
def etcd(directory: Path, *flags: str, scheme: str = "http", host: str = "127.0.0.1") -> Iterator[EtcdService]:
    """Its data in ``directory``, which lies where the test's files do. ``flags`` come last, and win."""
    program = needs("etcd", "etcd-server")
    directory.mkdir(parents=True, exist_ok=True)
    port, peer_port = free_port(), free_port()
    peer = f"http://127.0.0.1:{peer_port}"
    listen = f"{scheme}://{host}:{port}"
    argv = [program, "--data-dir", str(directory / "data"), "--log-level", "warn"]
    argv += ["--listen-client-urls", listen, "--advertise-client-urls", listen]
    argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    service = EtcdService([*argv, *flags], port, directory / "etcd.log", scheme=scheme)
    service.start()
    try:
        yield service
    finally:
        service.end()


@contextlib.contextmanager
def nats(directory: Path, configuration: str = "") -> Iterator[Service]:
    """``configuration``: lines of its file beside its address, such as ``max_payload: 8192``."""
    program = needs("nats-server", "nats-server")
    directory.mkdir(parents=True, exist_ok=True)
    port, file = free_port(), directory / "nats.conf"
    file.write_text(f"listen: 127.0.0.1:{port}\n{configuration}\n")
    service = Service([program, "-c", str(file)], port, directory / "nats.log")
    service.start()
    try:
        yield service
    finally:
        service.end()


def openssl(*arguments: str | Path, directory: Path, text: str = "") -> str:
    done = subprocess.run(
        [needs("openssl", "openssl"), *map(str, arguments)],
        cwd=directory,
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def certificates(
    directory: Path, names: Sequence[str] = ("server", "client"), *, server_usage: str = _EITHER_SIDE
) -> None:
    """``ca.pem``, and for each name ``NAME.pem`` and ``NAME-key.pem`` signed by it, good for 127.0.0.1 and either side:
    etcd's own gateway shows the server's certificate to etcd as a client does. ``server_usage``: of ``server.pem``."""
    directory.mkdir(parents=True, exist_ok=True)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")
    openssl(
        "req", "-x509", *key, "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=trtx tests", "-days", "2",
        directory=directory,
    )  # fmt: skip
    for name in names:
        usage = server_usage if name == "server" else _EITHER_SIDE
        (directory / "extensions").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
        openssl("req", *key, f"{name}-key.pem", "-out", f"{name}.csr", "-subj", "/O=trtx", directory=directory)
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions",
            directory=directory,
        )  # fmt: skip

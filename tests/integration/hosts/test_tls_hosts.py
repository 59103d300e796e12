"""Everything that can be protected over two hosts at once: HTTPS of the frontend, etcd over mutual TLS from PEM files,
NATS with a user and a password. Served, asked, measured from the host that has no frontend, and ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import Pair, make
from host_servers import ETCD_PORT, HostServer, etcd, nats
from host_shares import name_of, share, write_hosts
from namespaces import Host, Hosts
from processes import TRTX, until
from topology_clients import ServeCommand

from trtx.planes.credentials import EtcdAuth
from trtx.planes.etcd import Etcd

pytestmark = pytest.mark.proof

_PASSWORD = "a-word-that-stands-nowhere-else"
_HTTP_PORT = 8443
_LOAD = ("--concurrency", "2", "--isl", "32", "--osl", "8", "--request-count", "6", "--warmup-request-count", "2")


@dataclass(frozen=True)
class Secured:
    """Both shares, ready; ``files`` has all certificates, keys and passwords, the same on both hosts."""

    hosts: Hosts
    files: Path
    shares: tuple[ServeCommand, ServeCommand]
    authority: Pair

    @property
    def url(self) -> str:
        return f"https://{self.hosts.first.address}:{_HTTP_PORT}"

    @property
    def etcd_url(self) -> str:
        return f"https://{self.hosts.first.address}:{ETCD_PORT}"

    @property
    def etcd_auth(self) -> EtcdAuth:
        return EtcdAuth(*(self.files / name for name in ("authority.pem", "client.pem", "client.key")))


@pytest.fixture(scope="module")
def secured(hosts: Hosts) -> Iterator[Secured]:
    files = hosts.directory / "files"
    files.mkdir()
    authority = make(files, "authority")
    first = hosts.first.address
    make(files, "etcd", [first], signer=authority)  # without extendedKeyUsage: for either side, as its gateway needs
    make(files, "client", ["client"], signer=authority)
    make(files, "frontend", [first], signer=authority)
    (files / "password").touch(mode=0o600)
    (files / "password").write_text(f"{_PASSWORD}\n")
    with contextlib.ExitStack() as stack:
        for server in (_etcd(hosts.first, files), _nats(hosts.first, files)):
            server.start()
            stack.callback(server.end)
        names = {name: str(files / file) for name, file in _ETCD_FILES.items()}
        login = {"username": "trtx", "password_file": str(files / "password")}
        file = write_hosts(
            hosts,
            hosts.directory,
            etcd=[f"https://{first}:{ETCD_PORT}"],
            etcd_auth=names,
            nats_auth=login,
            node1={"roles": {"prefill": 1}},
            node2={"roles": {"decode": 1}},
        )
        tls = ("--tls-cert", str(files / "frontend.pem"), "--tls-key", str(files / "frontend.key"))
        words = ("--engine", "torch", "--model", "synthetic:tiny", "--mode", "disagg", "--port", str(_HTTP_PORT), *tls)
        stack.enter_context(hosts.first.entered())
        serving = stack.enter_context(share(hosts.first, hosts.directory, "serve", "--hosts", os.fspath(file), *words))
        until("the plan is published", lambda: "trtx serve join" in _said(serving))
        join = ["--etcd", f"https://{first}:{ETCD_PORT}", "--name", name_of(hosts)]
        join += ["--etcd-auth", _typed(names), "--nats-auth", _typed(login)]
        joined = stack.enter_context(share(hosts.second, hosts.directory, "serve", "join", *join))
        made = Secured(hosts, files, (serving, joined), authority)
        until("both shares are ready", lambda: _are_ready(made.shares))
        yield made
        for one in made.shares:
            one.process.send_signal(signal.SIGINT)
        for one in made.shares:
            assert one.process.wait(60) == 130, one.text()
        with Etcd([made.etcd_url], made.etcd_auth.read()) as client:
            assert client.range("v1/", is_prefix=True) == client.range("trtx/", is_prefix=True) == ()


_ETCD_FILES = {"ca": "authority.pem", "certificate": "client.pem", "key": "client.key"}


def _etcd(host: Host, files: Path) -> HostServer:
    plain = etcd(host, files.parent / "etcd-tls")
    url = f"https://{host.address}:{ETCD_PORT}"
    flags = ["--listen-client-urls", url, "--advertise-client-urls", url, "--client-cert-auth"]  # the last one counts
    for flag, name in (("cert", "etcd.pem"), ("key", "etcd.key"), ("trusted-ca", "authority.pem")):
        flags += [f"--{flag}-file", str(files / name)]
    return HostServer([*plain.argv, *flags], ETCD_PORT, plain.log_path, hosts=plain.hosts, host=host)


def _nats(host: Host, files: Path) -> HostServer:
    server = nats(host, files.parent / "nats-login")
    with (files.parent / "nats-login" / "nats.conf").open("a") as config:
        config.write(f"authorization {{user: trtx, password: {_PASSWORD}}}\n")
    return server


def _typed(files: dict[str, str]) -> str:
    return ",".join(f"{name}={file}" for name, file in files.items())


def _said(command: ServeCommand) -> str:
    assert command.process.poll() is None, f"trtx ended early:\n{command.text()}"
    return command.text()


def _are_ready(shares: tuple[ServeCommand, ServeCommand]) -> bool:
    texts = [_said(one) for one in shares]  # of both: one that ended leaves the other waiting
    return all("Ready: " in text for text in texts)


def test_a_client_of_the_other_host_is_answered_over_tls_alone(secured: Secured) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    trusting = ssl.create_default_context(cafile=str(secured.authority.certificate))
    asked = urllib.request.Request(
        f"{secured.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with secured.hosts.second.entered():
        with urllib.request.urlopen(asked, timeout=60, context=trusting) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(asked, timeout=60, context=ssl.create_default_context())
        with pytest.raises((OSError, http.client.HTTPException)):  # what it answers is no HTTP
            urllib.request.urlopen(secured.url.replace("https", "http") + "/v1/models", timeout=10)
    for one in secured.shares:
        assert re.search(r"Ready: https://\S+ serves tiny \(disagg, 2 workers on 2 hosts\)", one.text()), one.text()
        said = " ".join(one.text().split())  # its lines are filled
        assert said.count("clear text") == 1, "HTTP is not"
        assert "requests, answers, events, metrics and KV between the hosts are clear text" in said
        assert "can read" not in said, "every file is this user's alone"


def test_it_is_measured_from_the_host_without_a_frontend_and_its_workers_are_counted_in_etcd(secured: Secured) -> None:
    runs = secured.hosts.directory / "bench-runs"
    files = _typed({name: str(secured.files / file) for name, file in _ETCD_FILES.items()})
    command = ["bench", "--url", secured.url, "--etcd", secured.etcd_url, "--etcd-auth", files]
    command += ["--tokenizer", "synthetic:tiny", "--prompt-corpus", "random", *_LOAD, "-o", str(runs)]
    with secured.hosts.second.entered():
        done = subprocess.run(
            [*secured.hosts.second.through(), *TRTX, *command],
            env={**os.environ, "SSL_CERT_FILE": str(secured.authority.certificate), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs.iterdir()
    (row,) = json.loads((run / "summary.json").read_text())["rows"]
    assert (row["request_count"], row["error_request_count"]) == (6, 0)
    asked = (run / "run.lock.yaml").read_text()
    assert "prefill: 1" in asked and "decode: 1" in asked, asked


def test_no_secret_is_in_what_both_hosts_and_the_measurement_left(secured: Secured) -> None:
    keys = [secured.files / name for name in ("client.key", "frontend.key")]
    secrets = {_PASSWORD, *(line for key in keys for line in key.read_text().split("\n")[1:-2])}
    left = [path for path in secured.hosts.directory.rglob("*") if path.is_file() and path.parent != secured.files]
    assert [path for path in left if path.name == "plan.json"] and [path for path in left if path.suffix == ".log"]
    for path in left:
        if path.name != "nats.conf":
            assert not [one for one in secrets if one in path.read_text(errors="replace")], path

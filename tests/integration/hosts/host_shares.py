"""``trtx serve --hosts`` on the first host, ``trtx serve join`` on the second: a topology as a person starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from host_topology import Servers
from namespaces import Host, Hosts
from processes import HTTP
from topology_clients import ServeCommand, wait_until

from trtx.topology import Plan, ProcessSpec

NAME = "pair"
_START_S = 90.0
_END_S = 60.0


@dataclass
class ServedHosts:
    """Both shares of a topology, ready."""

    hosts: Hosts
    servers: Servers
    shares: dict[str, ServeCommand] = field(default_factory=dict)  # host -> its command

    @property
    def plan(self) -> Plan:
        return self.shares[self.hosts.first.name].plan()

    def process(self, name: str) -> ProcessSpec:
        (found,) = (process for process in self.plan.processes if process.name == name)
        return found

    def pid_of(self, name: str) -> int:
        return self.shares[self.process(name).host].pid_of(name)

    def kill(self, name: str) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)

    def requests(self) -> dict[str, float]:
        """Worker -> requests that it has answered since it started; one that can't be asked is left out."""
        found = {}
        for worker in self.plan.workers:
            with contextlib.suppress(httpx.TransportError):
                text = HTTP.get(f"http://{worker.address}:{worker.system_port}/metrics", timeout=2).text
                found[worker.name] = sum(map(float, re.findall(r"^trtx_requests_total\{.*\} (\S+)$", text, re.M)))
        return found

    def text(self) -> str:
        return "\n".join(f"--- {name}\n{share.text()}" for name, share in self.shares.items())


def write_hosts(hosts: Hosts, directory: Path, **fields: Any) -> Path:
    """hosts.yaml: ``fields`` of the file, and of its hosts those under their names (``node1={"frontends": 1}``)."""
    of_hosts = [
        {"name": host.name, "address": host.address, "device": host.device, "gpus": 0} | fields.pop(host.name, {})
        for host in hosts
    ]
    first = hosts.first.address
    document = {"name": NAME, "etcd": [f"http://{first}:2379"], "nats": f"nats://{first}:4222", "hosts": of_hosts}
    path = directory / "hosts.yaml"
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return path


@contextlib.contextmanager
def share(host: Host, directory: Path, *arguments: str) -> Iterator[ServeCommand]:
    """``trtx serve`` with ``arguments`` on ``host``; it is interrupted at the end, and has to end by itself."""
    output, runs = directory / f"{host.name}.txt", directory / f"{host.name}-runs"
    argv = [*host.through(), sys.executable, "-c", "from trtx.cli.app import main; main()", "serve", *arguments]
    with host.entered(), output.open("ab") as stream:
        process = subprocess.Popen(
            [*argv, "-o", os.fspath(runs)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # Or UCX takes the memory that processes of one machine share.
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"},
            start_new_session=True,
        )
    command = ServeCommand(process, output, runs)
    try:
        yield command
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the share of {host.name} did not end:\n{command.text()[-3000:]}") from None


@contextlib.contextmanager
def served_hosts(
    hosts: Hosts, servers: Servers, directory: Path, *arguments: str, **of_file: Any
) -> Iterator[ServedHosts]:
    """Inside it the calling thread is on the first host."""
    directory.mkdir(parents=True)
    file = write_hosts(hosts, directory, **of_file)
    served = ServedHosts(hosts, servers)
    etcd = ("--etcd", servers.etcd.url)
    with (
        hosts.first.entered(),
        share(hosts.first, directory, "--hosts", os.fspath(file), *arguments) as first,
    ):
        served.shares[hosts.first.name] = first
        wait_until(lambda: _has_plan(first), _START_S, f"a plan:\n{first.text()}")
        with share(hosts.second, directory, "join", *etcd, "--name", NAME) as second:
            served.shares[hosts.second.name] = second
            for one in (first, second):
                wait_until(lambda one=one: _is_ready(one), _START_S, "ready")  # type: ignore[misc]
            yield served


def _has_plan(command: ServeCommand) -> bool:
    assert command.process.poll() is None, f"trtx serve ended early:\n{command.text()}"
    return any(json.loads(path.read_text()) for path in command.run_parent.glob("*/plan.json"))


def _is_ready(command: ServeCommand) -> bool:
    assert command.process.poll() is None, f"trtx serve ended early:\n{command.text()}"
    return "Ready: " in command.text()

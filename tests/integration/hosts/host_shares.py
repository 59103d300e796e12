"""``trtx serve --hosts`` on the first host, ``trtx serve join`` on the second: a topology as a person starts it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from host_answers import listening
from host_servers import ETCD_PEER_PORT, ETCD_PORT, NATS_PORT
from host_topology import Servers
from namespaces import Host, Hosts
from processes import HTTP, TRTX, until
from topology_clients import ServeCommand

from trtx.launch.host_preparation import plan_again
from trtx.launch.published import find_published
from trtx.topology import EtcdService, Plan, ProcessSpec

_END_S = 60.0
_READY = "Ready: "
# UCX takes the memory that processes of one machine share, where nothing says otherwise.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"}
_ANSWERED = re.compile(r'^trtx_requests_total\{.*outcome="length".*\} (\S+)$', re.MULTILINE)


@dataclass
class ServedHosts:
    """Both shares of a topology, ready."""

    hosts: Hosts
    servers: Servers
    plan: Plan  # of both hosts, as it is published
    shares: dict[str, ServeCommand]  # host -> its command
    join: Callable[[], ServeCommand]  # starts the second host's share

    def join_again(self) -> None:
        """After the end of the second host's share."""
        share = self.shares[self.hosts.second.name]
        assert share.process.wait(30) is not None
        before = share.text().count(_READY)
        share = self.shares[self.hosts.second.name] = self.join()
        until("the second share is ready again", lambda: _is_ready(share, before))

    def process(self, name: str) -> ProcessSpec:
        (found,) = (process for process in self.plan.processes if process.name == name)
        return found

    def pid_of(self, name: str) -> int:
        return self.shares[self.process(name).host].pid_of(name)

    def kill(self, name: str) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)

    def requests(self) -> dict[str, float]:
        """Worker -> requests that it has answered whole since it started; one that can't be asked is left out."""
        found = {}
        for worker in self.plan.workers:
            with contextlib.suppress(httpx.TransportError):
                text = HTTP.get(f"http://{worker.address}:{worker.system_port}/metrics", timeout=2).text
                found[worker.name] = sum(map(float, _ANSWERED.findall(text)))
        return found

    def metric(self, name: str, family: str) -> float:
        """The sum of the samples of ``family`` that a worker serves."""
        worker = self.process(name)
        text = HTTP.get(f"http://{worker.address}:{worker.system_port}/metrics", timeout=10).text
        values = re.findall(rf"^{family}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert values, f"{family} is not served"
        return sum(map(float, values))

    def text(self) -> str:
        return "\n".join(f"--- {name}\n{share.text()}" for name, share in self.shares.items())


def name_of(hosts: Hosts) -> str:
    """Of the topology. The namespaces share their processes' ids: a share that ends would end those of another run."""
    return hosts.first.namespace.removesuffix(f"-{hosts.first.name}").replace("trtx", "pair")


def write_hosts(hosts: Hosts, directory: Path, **fields: Any) -> Path:
    """hosts.yaml: ``fields`` of the file, and of its hosts those under their names (``node1={"frontends": 1}``)."""
    of_hosts = [
        {"name": host.name, "address": host.address, "device": host.device, "gpus": 0} | fields.pop(host.name, {})
        for host in hosts
    ]
    first = hosts.first.address
    document = {
        "name": name_of(hosts),
        "etcd": [f"http://{first}:2379"],
        "nats": f"nats://{first}:4222",
        "hosts": of_hosts,
    }
    path = directory / "hosts.yaml"
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return path


@contextlib.contextmanager
def share(host: Host, directory: Path, *arguments: str) -> Iterator[ServeCommand]:
    """``trtx`` with ``arguments`` on ``host``; it is interrupted at the end, and has to end by itself."""
    output, runs, temporary = (directory / f"{host.name}{kind}" for kind in (".txt", "-runs", "-tmp"))
    temporary.mkdir(exist_ok=True)  # hosts share no /tmp
    argv = [*host.through(), *TRTX, *arguments]
    with host.entered(), output.open("ab") as stream:
        process = subprocess.Popen(
            [*argv, "-o", os.fspath(runs)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, "TMPDIR": os.fspath(temporary)},
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
    with (
        hosts.first.entered(),
        share(hosts.first, directory, "serve", "--hosts", os.fspath(file), *arguments) as first,
    ):
        join = until("the plan is published", lambda: _join_command(first))
        with contextlib.ExitStack() as of_second:

            def start() -> ServeCommand:
                return of_second.enter_context(share(hosts.second, directory, *join))

            second = start()
            for one in (first, second):
                until("both shares are ready", lambda one=one: _is_ready(one))  # type: ignore[misc]
            found = find_published(EtcdService((servers.etcd.url,), lease_ttl_s=30), name_of(hosts))
            plan = plan_again(found.asked, model_path=found.check_here(None), this_host=None, run_dir=directory)
            yield ServedHosts(hosts, servers, plan, {hosts.first.name: first, hosts.second.name: second}, start)


def services(host: Host, hosts: Hosts) -> set[int]:
    """Ports of etcd and NATS there."""
    return {ETCD_PORT, ETCD_PEER_PORT, NATS_PORT} if host == hosts.first else set()


def unplanned(plan: Plan, host: Host, beside: set[int]) -> set[int]:
    """Ports on which something listens on ``host`` without having been planned, all on its one address. AssertionError
    for another address, for what was planned and does not listen, and for another number of KV's ports than of workers
    that hand it over."""
    found = [pair for sockets in listening(host).values() for pair in sockets]
    assert {address for address, _ in found} == {host.address}
    here = plan.share(host.name).processes
    planned = {port for process in here for port in process.ports.values()} | beside
    planned |= {process.http_port for process in here if process.http_port is not None}
    of_kv = {port for one in here if one.kv_ports for port in range(one.kv_ports[0], one.kv_ports[1] + 1)}
    # Without routing by prefix Dynamo's frontend opens no port for requests.
    unused = {process.request_port for process in here if process.role == "frontend"}
    ports = {port for _, port in found}
    assert planned - unused <= ports
    hand_over = [process for process in here if process.kv_ports and process.role != "agg"]
    assert len(ports & of_kv) == len(hand_over)
    return ports - planned - of_kv


def _join_command(command: ServeCommand) -> list[str] | None:
    """What the first share tells a person to start on the second host."""
    assert command.process.poll() is None, f"trtx serve ended early:\n{command.text()}"
    found = re.search(r"^On \S+: trtx (serve join .*)$", command.text(), re.MULTILINE)
    return shlex.split(found[1]) if found else None


def _is_ready(command: ServeCommand, before: int = 0) -> bool:
    assert command.process.poll() is None, f"trtx serve ended early:\n{command.text()}"
    return command.text().count(_READY) > before

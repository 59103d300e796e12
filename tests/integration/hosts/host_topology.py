"""Frontends and workers as real processes on two hosts, over etcd, TCP and NATS."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from host_servers import ETCD_PORT, NATS_PORT, HostEtcd, HostServer, etcd, nats
from namespaces import Host, Hosts
from processes import HTTP, Child, Topology

LEASE_TTL_S = 30
_ONE_MACHINE = ("DYN_FILE_KV", "DYN_ZMQ_BROKER_URL")


@dataclass
class HostsTopology(Topology):
    """What is started is started on ``host``: the one that was last gone to by :meth:`on`."""

    hosts: Hosts = field(kw_only=True)
    host: Host = field(kw_only=True)
    places: dict[str, Host] = field(default_factory=dict)  # child -> its host
    lease_ttl_s: int = LEASE_TTL_S

    @property
    def url(self) -> str:
        return f"http://{self.hosts.first.address}:{self.port}"

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[None]:
        before, self.host = self.host, host
        try:
            with host.entered():
                yield
        finally:
            self.host = before

    def environment(self) -> dict[str, str]:
        first = self.hosts.first
        of_one_machine = {k: v for k, v in super().environment().items() if k not in _ONE_MACHINE}
        return (
            of_one_machine
            | {
                "DYN_NAMESPACE": self.directory.name,
                "DYN_DISCOVERY_BACKEND": "etcd",
                "ETCD_ENDPOINTS": f"http://{first.address}:{ETCD_PORT}",
                "ETCD_LEASE_TTL": str(self.lease_ttl_s),
                "DYN_EVENT_PLANE": "nats",
                "NATS_SERVER": f"nats://{first.address}:{NATS_PORT}",
                "DYN_TCP_RPC_HOST": self.host.address,
                "DYN_TCP_RESPONSE_STREAM_HOST": self.host.address,
                "DYN_SYSTEM_HOST": self.host.address,
                "UCX_NET_DEVICES": self.host.device,
                # Or UCX takes the memory that processes of one machine share, and nothing crosses the link.
                "UCX_TLS": "tcp",
            }
            | self.extra_environment
        )

    def spawn(
        self, name: str, argv: list[str], environment: dict[str, str] | None = None, through: tuple[str, ...] = ()
    ) -> Child:
        self.places[name] = self.host
        return super().spawn(name, argv, environment, through or self.host.through())

    def start_frontend(self, *flags: str) -> Child:
        """Where it runs the model's files are not: they come from the workers, into a home of its own."""
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        argv = ["-m", "trtx.frontend", "--http-host", self.host.address, "--http-port", str(self.port)]
        return self.spawn("frontend", [*argv, *flags], {"HOME": os.fspath(home)}, self.host.through(self.model))

    def metric(self, worker: Child, name: str) -> float:
        """The sum of the samples called ``name``, labels in it included as ``name{outcome="..."``."""
        host = self.places[worker.name]
        text = HTTP.get(f"http://{host.address}:{worker.system_port}/metrics", timeout=10).text
        name, _, label = name.partition("{")
        found = re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE)
        values = [float(value) for labels, value in found if label in labels]
        assert values, f"{name} is not served"
        return sum(values)


@dataclass(frozen=True)
class Servers:
    """The two servers of a topology over hosts."""

    etcd: HostEtcd
    nats: HostServer

    def pids(self) -> set[int]:
        return {server.process.pid for server in (self.etcd, self.nats) if server.process is not None}


@contextlib.contextmanager
def servers_on(host: Host, directory: Path) -> Iterator[Servers]:
    servers = Servers(etcd(host, directory / "etcd"), nats(host, directory / "nats"))
    try:
        servers.etcd.start()
        servers.nats.start()
        yield servers
    finally:
        servers.nats.end()
        servers.etcd.end()


@contextlib.contextmanager
def over_hosts(hosts: Hosts, name: str, model: Path) -> Iterator[HostsTopology]:
    """Inside it the calling thread is on the first host. Stops everything at the end, whatever happened."""
    directory = hosts.directory / name
    directory.mkdir()
    running = HostsTopology(directory, model, hosts=hosts, host=hosts.first)
    with hosts.first.entered():
        try:
            yield running
        finally:
            running.stop()

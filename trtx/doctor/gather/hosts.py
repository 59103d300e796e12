"""Gathers the facts about a topology over hosts: this host, the other hosts through their doctors, etcd and NATS."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil

from trtx.config.hosts import Certificates, HostSpec, HostsSpec, Password, Token
from trtx.doctor.gather.gpus import Gpus
from trtx.doctor.gather.meeting import PortListener, meet
from trtx.doctor.gather.software import Software
from trtx.doctor.host_facts import HostReport, HostsFacts, NetworkDevice, PortSpan, TakenPort, WantedHost
from trtx.planes.credentials import EtcdAuth, NatsAuth
from trtx.planes.fitness import look_at_etcd
from trtx.planes.nats import ask_nats
from trtx.planes.secret_files import look_at_secrets
from trtx.topology import TOPOLOGY_VARIABLE, request_protection

_PACKAGES = ("trtx", "ai-dynamo", "ai-dynamo-runtime", "nixl", "tensorrt-llm", "torch", "transformers")
# Ports of a worker: requests and the system port, and those that UCX may use for each rank. Of a frontend: requests of
# other frontends, and responses.
_PORTS_A_WORKER, _KV_PORTS_A_RANK, _PORTS_A_FRONTEND = 2, 4, 2


def gather_hosts(
    spec: HostsSpec, this_host: str, *, http_port: int, wait_s: float, software: Software, gpus: Gpus
) -> HostsFacts:
    """Gathers the facts about all hosts, in up to ``wait_s`` plus a few seconds.

    Raises UsageError for credentials that can't be read.
    """
    hosts = tuple(_wanted(spec, host, http_port) for host in spec.hosts)
    own = next(host for host in hosts if host.name == this_host)
    others = [host for host in hosts if host.name != this_host]
    etcd_auth = _etcd_auth(spec)
    nats_auth = _nats_auth(spec)
    began = time.monotonic()
    taken = _taken(own, f"{_namespace(spec)}.{this_host}")
    devices = tuple(_device(name) for name in own.devices)
    versions = {"python": software.python}
    versions |= {name: software.packages[name].version for name in _PACKAGES if name in software.packages}

    def report() -> HostReport:
        return HostReport(this_host, time.time(), versions, len(gpus.visible), devices, taken)

    with PortListener(own, others, report) as listener:
        met = meet(own, others, listener, wait_s=wait_s)
    return HostsFacts(
        this_host=this_host,
        hosts=hosts,
        own=report(),
        met=met,
        waited_s=time.monotonic() - began,
        etcd=tuple(look_at_etcd(url, etcd_auth) for url in spec.etcd),
        nats_url=spec.nats,
        nats=ask_nats(spec.nats, nats_auth),
        secret_files=look_at_secrets(etcd_auth, nats_auth),
        etcd_way="open" if etcd_auth is None else "tls" if etcd_auth.ca is not None else "password",
        nats_way="open" if nats_auth is None else "token" if nats_auth.token_file is not None else "password",
        requests=request_protection(os.environ),
    )


def _namespace(spec: HostsSpec) -> str:
    return f"trtx-{spec.name or ''}"


def _etcd_auth(spec: HostsSpec) -> EtcdAuth | None:
    match spec.etcd_auth:
        case Certificates(ca=ca, certificate=certificate, key=key):
            return EtcdAuth(ca=ca, certificate=certificate, key=key)
        case Password(username=username, password_file=file):
            return EtcdAuth(username=username, password_file=file)
    return None


def _nats_auth(spec: HostsSpec) -> NatsAuth | None:
    match spec.nats_auth:
        case Token(token_file=file):
            return NatsAuth(token_file=file)
        case Password(username=username, password_file=file):
            return NatsAuth(username=username, password_file=file)
    return None


def _wanted(spec: HostsSpec, host: HostSpec, http_port: int) -> WantedHost:
    frontends, gpus = spec.frontends_of(host), len(host.gpu_indices)
    # Without roles there are at most as many workers as GPUs. One worker of several GPUs uses as many ports as several.
    workers = sum(host.roles.values()) if host.roles is not None else 0 if spec.has_roles else max(1, gpus)
    count = _PORTS_A_FRONTEND * frontends + _PORTS_A_WORKER * workers + _KV_PORTS_A_RANK * max(workers, gpus)
    last = min(host.first_port + count, 1 << 16)
    return WantedHost(
        host.name,
        host.address,
        tuple(host.device.split(",")) if host.device is not None else (),
        gpus,
        PortSpan(
            tuple(range(http_port, min(http_port + frontends, 1 << 16))),
            tuple(range(host.first_port, last)),
        ),
    )


def _device(name: str) -> NetworkDevice:
    plain = name.partition(":")[0]
    if (Path("/sys/class/infiniband") / plain).is_dir():
        return NetworkDevice(name, exists=True, is_up=True)
    addresses, stats = psutil.net_if_addrs().get(plain), psutil.net_if_stats().get(plain)
    if stats is None:
        return NetworkDevice(name, exists=False)
    return NetworkDevice(
        name,
        exists=True,
        is_up=stats.isup,
        addresses=tuple(entry.address for entry in addresses or () if entry.family == socket.AF_INET),
    )


def _taken(own: WantedHost, marker: str) -> tuple[TakenPort, ...]:
    problems: dict[int, str] = {}
    for port in own.ports.all:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((own.address, port))
                probe.listen()
            except OSError as error:
                problems[port] = error.strerror or str(error)
    if not problems:
        return ()
    holders = {port: pid for address, port, pid in _listening() if address in (own.address, "0.0.0.0", "::")}
    return tuple(_holder(port, problem, holders.get(port), marker) for port, problem in problems.items())


def _listening() -> list[tuple[str, int, int | None]]:
    """Returns address, port and, if visible, pid of all listening TCP sockets on this host."""
    try:
        entries = [entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return []
    return [(*entry.laddr, entry.pid) for entry in entries if entry.laddr]


def _holder(port: int, problem: str, pid: int | None, marker: str) -> TakenPort:
    if pid is None:
        return TakenPort(port, problem, is_own=False)
    try:
        process = psutil.Process(pid)
        name = process.name()
        is_own = process.environ().get(TOPOLOGY_VARIABLE) == marker
    except (psutil.Error, OSError):
        return TakenPort(port, f"pid {pid}", is_own=False)
    return TakenPort(port, f"{name}, pid {pid}", is_own)

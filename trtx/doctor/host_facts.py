"""The facts about a topology's hosts: this host, the hosts whose doctors answered, etcd and NATS.

They are plain values, as in :mod:`trtx.doctor.facts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtx.planes.fitness import EtcdEndpoint
from trtx.planes.nats import NatsAnswer
from trtx.planes.secret_files import SecretFile


@dataclass(frozen=True, slots=True)
class PortSpan:
    """The ports of a topology on one host: the frontends' HTTP ports, and the range from ``first_port`` on."""

    http: tuple[int, ...]
    planned: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.http + self.planned


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """A network device that the hosts file names for this host."""

    name: str
    exists: bool
    is_up: bool = False
    addresses: tuple[str, ...] = ()  # IPv4


@dataclass(frozen=True, slots=True)
class TakenPort:
    """A planned port that can't be bound on its host."""

    port: int
    by: str  # the process, or the system's error message
    is_own: bool  # the process belongs to this topology, which is already running


@dataclass(frozen=True, slots=True)
class HostReport:
    """A doctor's report about its own host, for itself and for the other doctors."""

    host: str  # the host's name
    time_s: float  # its clock at the time of the answer, since the epoch
    versions: dict[str, str]  # by package name, and of python
    gpus: int  # visible GPUs
    devices: tuple[NetworkDevice, ...]  # the kernel's network devices, without InfiniBand devices
    taken: tuple[TakenPort, ...]


PortState = Literal["answered", "other", "refused", "silent"]
"""Who answered on a port: a doctor; another program; the host, which refused the connection; or no one in time."""


@dataclass(frozen=True, slots=True)
class Met:
    """The result of dialling one host from this host."""

    ports: dict[int, PortState]
    report: HostReport | None = None  # None: no doctor answered there in time
    ahead_s: float | None = None  # its clock minus this host's clock
    within_s: float = 0.0  # the possible error of ahead_s


@dataclass(frozen=True, slots=True)
class WantedHost:
    """One host of the hosts file."""

    name: str
    address: str
    devices: tuple[str, ...]
    gpus: int
    ports: PortSpan


@dataclass(frozen=True, slots=True)
class HostsFacts:
    """All facts that the checks of hosts judge. ``met``: every other host, by name."""

    this_host: str
    hosts: tuple[WantedHost, ...]
    own: HostReport
    met: dict[str, Met]
    waited_s: float
    etcd: tuple[EtcdEndpoint, ...]
    nats_url: str
    nats: NatsAnswer
    secret_files: tuple[SecretFile, ...]
    etcd_way: Literal["tls", "password", "open"]
    nats_way: Literal["password", "token", "open"]
    requests: str  # the protection of requests and answers, as this process's environment sets it

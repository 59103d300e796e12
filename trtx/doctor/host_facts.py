"""What is known of a topology's hosts before anything is judged: of this one, of those whose doctor answered, of etcd
and NATS. Plain values, as in :mod:`trtx.doctor.facts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtx.planes.fitness import EtcdEndpoint
from trtx.planes.nats import NatsAnswer
from trtx.planes.secret_files import SecretFile


@dataclass(frozen=True, slots=True)
class PortSpan:
    """What a topology may listen on at one host: HTTP of its frontends, then the ports from ``first_port`` on."""

    http: tuple[int, ...]
    planned: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.http + self.planned


@dataclass(frozen=True, slots=True)
class Device:
    """A network device that a host was asked for."""

    name: str
    exists: bool
    is_up: bool = False
    addresses: tuple[str, ...] = ()  # IPv4
    has_link_local_ipv6: bool = False


@dataclass(frozen=True, slots=True)
class TakenPort:
    """A planned port that can't be bound on its host."""

    port: int
    by: str  # the process, or what the system says
    is_own: bool  # it is of this very topology, which runs already


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host's doctor says of its own host, to itself and to the others'."""

    host: str  # by name
    time_s: float  # its clock as it answers, since the epoch
    versions: dict[str, str]  # by package, and python
    gpus: int  # visible
    devices: tuple[Device, ...]  # of InfiniBand none: the kernel's network devices alone
    route_address: str | None  # of the default route, where Dynamo's frontends wait for answers; None: none
    taken: tuple[TakenPort, ...]


PortState = Literal["answered", "other", "refused", "silent"]
"""By a doctor; by something else; by nobody, and the host said so; by nobody at all."""


@dataclass(frozen=True, slots=True)
class Met:
    """One host as it was reached from this one."""

    ports: dict[int, PortState]
    report: HostReport | None = None  # None: no doctor answered there in time
    ahead_s: float | None = None  # its clock beside this one's; positive: ahead
    within_s: float = 0.0  # how far that may be off


@dataclass(frozen=True, slots=True)
class WantedHost:
    """One host, as the hosts file has it."""

    name: str
    address: str
    devices: tuple[str, ...]
    gpus: int
    has_frontend: bool
    ports: PortSpan


@dataclass(frozen=True, slots=True)
class HostsFacts:
    """Everything that the rows about hosts judge. ``met`` has every host but this one, by name."""

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

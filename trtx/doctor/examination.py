"""Examines this machine: gathers the facts and judges them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trtx.config.hosts import HostsSpec
from trtx.doctor.check import Check
from trtx.doctor.facts import Facts
from trtx.doctor.gather import gather_gpus, gather_hosts, gather_software, gather_system, gather_topologies
from trtx.doctor.judge import judge
from trtx.engine import resolve_kind
from trtx.launch import host_here
from trtx.topology import PlannedHost


@dataclass(frozen=True, slots=True)
class IntendedUse:
    """The intended use of this machine, which the checks are made for."""

    engine: str = "auto"
    port: int = 8000
    runs: Path = Path("runs")
    hosts: WantedHosts | None = None


@dataclass(frozen=True, slots=True)
class WantedHosts:
    """A topology over several hosts that includes this machine.

    ``this_host``: this machine's name in the topology; None: the host whose address it has. ``wait_s``: how long to
    wait for the doctors of the other hosts.
    """

    spec: HostsSpec
    this_host: str | None = None
    wait_s: float = 10.0


def examine(wanted: IntendedUse) -> tuple[Check, ...]:
    """Returns the check results. Takes about a second, plus the time to wait for other hosts. Leaves no files behind.

    Raises UsageError if this machine is none of the hosts, or if a credentials file can't be read.
    """
    return judge(gather(wanted))


def gather(wanted: IntendedUse) -> Facts:
    gpus, software = gather_gpus(), gather_software()
    hosts = None
    if (asked := wanted.hosts) is not None:
        named = [PlannedHost(host.name, host.address, host.device or "") for host in asked.spec.hosts]
        here = host_here(named, asked.this_host)
        hosts = gather_hosts(asked.spec, here, http_port=wanted.port, wait_s=asked.wait_s, software=software, gpus=gpus)
    return Facts(
        engine_asked=wanted.engine,
        engine=resolve_kind(wanted.engine, has_gpu=bool(gpus.visible)),
        software=software,
        gpus=gpus,
        system=gather_system(wanted.port, wanted.runs),
        topologies=gather_topologies(),
        environment=dict(os.environ),
        hosts=hosts,
    )

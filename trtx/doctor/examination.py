"""From what is wanted to the rows."""

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
class Wanted:
    """What one means to do here."""

    engine: str = "auto"
    port: int = 8000
    runs: Path = Path("runs")
    hosts: WantedHosts | None = None


@dataclass(frozen=True, slots=True)
class WantedHosts:
    """A topology over several hosts, of which this machine is one: ``this_host``, or the one whose address it has.
    ``wait_s``: for the doctors of the others."""

    spec: HostsSpec
    this_host: str | None = None
    wait_s: float = 10.0


def examine(wanted: Wanted) -> tuple[Check, ...]:
    """Looks and judges; takes about a second, with hosts their time too. Writes nothing that stays. Raises UsageError
    where this machine is none of the hosts, or a file of credentials can't be read."""
    return judge(gather(wanted))


def gather(wanted: Wanted) -> Facts:
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

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one means to do here."""

    engine: str = "auto"
    port: int = 8000
    runs: Path = Path("runs")
    hosts: WantedHosts | None = None


@dataclass(frozen=True, slots=True)
class WantedHosts:
    """A topology over several hosts, of which this machine is one. ``wait_s``: for the doctors of the others."""

    spec: HostsSpec
    this_host: str
    wait_s: float = 10.0


def examine(wanted: Wanted) -> tuple[Check, ...]:
    """Looks and judges; takes about a second, with hosts their time too. Writes nothing that stays."""
    return judge(gather(wanted))


def gather(wanted: Wanted) -> Facts:
    gpus, software = gather_gpus(), gather_software()
    return Facts(
        engine_asked=wanted.engine,
        engine=resolve_kind(wanted.engine, has_gpu=bool(gpus.visible)),
        software=software,
        gpus=gpus,
        system=gather_system(wanted.port, wanted.runs),
        topologies=gather_topologies(),
        environment=dict(os.environ),
        hosts=None
        if wanted.hosts is None
        else gather_hosts(
            wanted.hosts.spec,
            wanted.hosts.this_host,
            http_port=wanted.port,
            wait_s=wanted.hosts.wait_s,
            software=software,
            gpus=gpus,
        ),
    )

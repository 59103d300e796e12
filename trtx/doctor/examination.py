"""From what is wanted to the rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trtx.doctor.check import Check
from trtx.doctor.facts import Facts
from trtx.doctor.gather import gather_gpus, gather_software, gather_system, gather_topologies
from trtx.doctor.judge import judge
from trtx.engine import resolve_kind


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one means to do here."""

    engine: str = "auto"
    port: int = 8000
    runs: Path = Path("runs")


def examine(wanted: Wanted) -> tuple[Check, ...]:
    """Looks and judges; takes about a second. Writes nothing that stays."""
    return judge(gather(wanted))


def gather(wanted: Wanted) -> Facts:
    gpus = gather_gpus()
    return Facts(
        engine_asked=wanted.engine,
        engine=resolve_kind(wanted.engine, has_gpu=bool(gpus.visible)),
        software=gather_software(),
        gpus=gpus,
        system=gather_system(wanted.port, wanted.runs),
        topologies=gather_topologies(),
        environment=dict(os.environ),
    )

"""Topologies planned on machines of the test's choice: pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.topology import BrokerPorts, Gpu, Machine, Plan, Ports, plan


@dataclass(frozen=True)
class Model:
    path: Path = Path("/models/tiny")
    served_model_name: str = "tiny"


def machine(gpus: int, pairs: tuple[tuple[int, int], ...] = (), cores: int = 8) -> Machine:
    """``pairs``: GPUs joined by NVLink."""
    peers = {index: {b for a, b in pairs if a == index} | {a for a, b in pairs if b == index} for index in range(gpus)}
    found = (Gpu(index, f"GPU-{index:04x}", "Test GPU", 80 << 30, tuple(sorted(peers[index]))) for index in range(gpus))
    return Machine(tuple(found), cores)


def plan_of(
    there: Machine,
    *,
    engine: str = "torch",
    values: Mapping[str, Any] | None = None,
    run_dir: str = "/runs/one",
    engine_version: str | None = None,
    **spec: Any,
) -> Plan:
    asked = TopologySpec(**spec)
    configs: dict[Role, ResolvedEngineConfig] = {
        role: ResolvedEngineConfig(role, dict(values or {}), "test", (f"{role}: test",)) for role in asked.roles
    }
    count = sum(asked.roles.values())
    return plan(
        asked,
        there,
        checkpoint=Model(),
        engine=engine,
        engine_configs=configs,
        ports=Ports((8000,), (BrokerPorts(9000, 9001),), tuple(range(9002, 9002 + count))),
        namespace="trtx-test",
        run_dir=Path(run_dir),
        scratch_dir=Path("/scratch"),
        engine_version=engine_version,
    )

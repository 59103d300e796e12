"""The facts about a machine that the checks judge. They are plain values, so a test can describe any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtx.doctor.gather.gpus import ComputeMode, GpuFacts, GpuPair, Gpus, Mig
from trtx.doctor.gather.nvml import GpuProcess, GpuState
from trtx.doctor.gather.software import Package, Software
from trtx.doctor.gather.system import Directory, System
from trtx.doctor.gather.topologies import Topology
from trtx.doctor.host_facts import HostsFacts
from trtx.engine import EngineKind, needs_gpu
from trtx.nvml import ClockReason

__all__ = [
    "ClockReason",
    "ComputeMode",
    "Directory",
    "Facts",
    "GpuFacts",
    "GpuPair",
    "GpuProcess",
    "GpuState",
    "Gpus",
    "Mig",
    "Package",
    "Software",
    "System",
    "Topology",
]


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts that the checks judge."""

    engine_asked: str
    engine: EngineKind  # the engine that it resolves to on this machine
    software: Software
    gpus: Gpus
    system: System
    topologies: tuple[Topology, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: HostsFacts | None = None  # set for a topology over several hosts

    @property
    def tensorrt_llm(self) -> str | None:
        """The installed version of TensorRT-LLM, or None."""
        package = self.software.packages.get("tensorrt-llm")
        return package.version if package else None

    @property
    def needs_gpu(self) -> bool:
        """Whether the engine needs a GPU. A local version ``+cpu`` marks a stand-in package that does not."""
        return self.engine == "tensorrt-llm" and needs_gpu(self.tensorrt_llm or "")

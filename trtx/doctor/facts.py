"""The facts about a machine that the checks judge. They are plain values, so a test can describe any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trtx.doctor.host_facts import HostsFacts
from trtx.engine import EngineKind, needs_gpu

ClockReason = Literal[
    "idle",
    "application clocks",
    "power limit",
    "hardware slowdown",
    "sync boost",
    "thermal, by software",
    "thermal, by hardware",
    "power brake",
    "display clocks",
]
ComputeMode = Literal["default", "exclusive process", "prohibited"]
Mig = Literal["off", "on", "slice"]  # slice: the device is a part of a GPU


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution. ``requires`` is its Requires-Dist, as written."""

    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Software:
    """Python and its packages. Keys of ``packages`` are normalized names: ``tensorrt-llm``, ``nixl-cu13``."""

    python: str
    requires_python: str | None  # trtx's Requires-Python; None: trtx is not installed as a package
    packages: Mapping[str, Package]
    torch_cuda: str | None = None  # CUDA release that torch was built for, such as 13.0; None: a CPU build
    open_mpi: str | None = None  # the version of the mpirun on PATH
    gpl_codecs: tuple[str, ...] = ()  # those of x264 and x265 that PyAV's wheel installed


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. ``name``: None for a process of another container or another user."""

    pid: int
    name: str | None
    memory_bytes: int | None
    topology: str | None = None  # the process's trtx topology; None: none, or its environment can't be read
    sm_percent: float | None = None  # the recent SM utilization

    @property
    def is_ours(self) -> bool:
        return self.topology is not None


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU that changes during work. None: NVML does not report the value."""

    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    clock_reasons: tuple[ClockReason, ...] | None
    power_w: float | None
    temperature_c: int | None
    memory_used_bytes: int | None
    processes: tuple[GpuProcess, ...] | None  # compute processes; in a container NVML may report others, or none


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. None: NVML does not report the value, as on MIG slices and some desktop GPUs."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    application_sm_clock_mhz: int | None = None  # the configured application clock
    clock_reasons: tuple[ClockReason, ...] = ()
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    uncorrected_ecc_errors: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # memory rows will be remapped at the next reset
    remap_failed: bool | None = None
    recovery: str | None = None  # the action that NVML requests after an Xid, or "none"
    persistence: bool | None = None
    compute_mode: ComputeMode | None = None
    mig: Mig = "off"
    nvlinks_up: int = 0
    fabric_ready: bool | None = None  # None: not behind an NVSwitch
    uuid: str | None = None  # in the form that CUDA_VISIBLE_DEVICES accepts


@dataclass(frozen=True, slots=True)
class Pair:
    """The connection between two visible GPUs."""

    first: int
    second: int
    nvlink: bool
    peer_access: bool | None
    path: str  # the name in `nvidia-smi topo -m`: PIX, PXB, PHB, NODE, SYS


@dataclass(frozen=True, slots=True)
class Gpus:
    """The driver and its GPUs. ``problem``: NVML's error message if it did not answer."""

    problem: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None  # the highest CUDA release that the driver, or a compat package, supports
    installed: int = 0  # GPUs that NVML counts, visible or not; without NVML, those on the PCI bus
    visible: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that trtx writes to, or its nearest existing parent."""

    name: str
    path: Path
    free_bytes: int
    problem: str | None = None  # why a test file could not be written


@dataclass(frozen=True, slots=True)
class System:
    """The machine without its GPUs."""

    cpu_cores: int
    load_average: float  # the number of runnable processes, averaged over the last minute
    memory_available_bytes: int
    open_files: int  # soft limit
    open_files_hard: int
    inotify_used: int  # inotify instances of this user
    inotify_limit: int | None
    shm_bytes: int | None  # size of /dev/shm
    port: int
    port_problem: str | None
    ephemeral_first: int | None
    directories: tuple[Directory, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A topology of trtx, or a load of ``trtx bench``, with processes or short-lived files on this machine."""

    name: str  # the name of its scratch directory: trtx-1a2b3c4d, trtx-aiperf-x1y2z3
    pids: tuple[int, ...]
    is_guarded: bool  # its guardian is alive, so its launcher is too, or the guardian is cleaning up
    scratch: Path | None = None  # the scratch directory, if it exists


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

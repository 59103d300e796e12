"""What is known of a machine before anything is judged. Plain values: a test can describe any machine with them."""

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
    requires_python: str | None  # of trtx; None: trtx is not installed as a package
    packages: Mapping[str, Package]
    torch_cuda: str | None = None  # CUDA release that torch was built for, such as 13.0; None: a CPU build
    open_mpi: str | None = None  # of the mpirun on PATH
    gpl_codecs: tuple[str, ...] = ()  # that came with PyAV: of x264 and x265


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. ``name`` is None where it is in another container or another user's."""

    pid: int
    name: str | None
    memory_bytes: int | None
    topology: str | None = None  # the trtx topology that it is of; None: of none, or its environment can't be read
    sm_percent: float | None = None  # of the GPU's time, lately

    @property
    def is_ours(self) -> bool:
        return self.topology is not None


@dataclass(frozen=True, slots=True)
class GpuState:
    """What of a GPU changes as it works. None: NVML does not say."""

    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    clock_reasons: tuple[ClockReason, ...] | None
    power_w: float | None
    temperature_c: int | None
    memory_used_bytes: int | None
    processes: tuple[GpuProcess, ...] | None  # those that compute; in a container NVML may name others, or none


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. None: NVML does not say, as on MIG slices and some desktop GPUs."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    application_sm_clock_mhz: int | None = None  # that computing is asked to run at
    clock_reasons: tuple[ClockReason, ...] = ()
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    uncorrected_ecc_errors: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # memory rows wait for a reset to be replaced
    remap_failed: bool | None = None
    recovery: str | None = None  # what NVML asks for after an Xid; "none": nothing
    persistence: bool | None = None
    compute_mode: ComputeMode | None = None
    mig: Mig = "off"
    nvlinks_up: int = 0
    fabric_ready: bool | None = None  # None: not behind an NVSwitch
    uuid: str | None = None  # as CUDA_VISIBLE_DEVICES takes it


@dataclass(frozen=True, slots=True)
class Pair:
    """How two visible GPUs reach each other."""

    first: int
    second: int
    nvlink: bool
    peer_access: bool | None
    path: str  # as `nvidia-smi topo -m` names it: PIX, PXB, PHB, NODE, SYS


@dataclass(frozen=True, slots=True)
class Gpus:
    """The driver and what it shows. ``problem`` is NVML's own word when it did not answer."""

    problem: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None  # highest CUDA release that the driver, or a compat package, runs
    installed: int = 0  # GPUs that NVML counts, visible or not; without NVML, those on the PCI bus
    visible: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that trtx writes to, or the nearest one above it that exists."""

    name: str
    path: Path
    free_bytes: int
    problem: str | None = None  # why a file could not be written there


@dataclass(frozen=True, slots=True)
class System:
    """The machine around the GPUs."""

    cpu_cores: int
    load_average: float  # processes that wanted a core, over the last minute
    memory_available_bytes: int
    open_files: int  # soft limit
    open_files_hard: int
    inotify_used: int  # instances of this user
    inotify_limit: int | None
    shm_bytes: int | None  # size of /dev/shm
    port: int
    port_problem: str | None
    ephemeral_first: int | None
    directories: tuple[Directory, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A topology of trtx, or a load of ``trtx bench``, with processes or short-lived files on this machine."""

    name: str  # of its scratch directory: trtx-1a2b3c4d, trtx-aiperf-x1y2z3
    pids: tuple[int, ...]
    is_guarded: bool  # its guardian lives: its launcher does too, or the guardian is cleaning up after it
    scratch: Path | None = None  # where it is there


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks judge."""

    engine_asked: str
    engine: EngineKind  # what it resolves to here
    software: Software
    gpus: Gpus
    system: System
    topologies: tuple[Topology, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: HostsFacts | None = None  # where one over several hosts is asked about

    @property
    def tensorrt_llm(self) -> str | None:
        """Installed version."""
        package = self.software.packages.get("tensorrt-llm")
        return package.version if package else None

    @property
    def needs_gpu(self) -> bool:
        """False for a local version ``+cpu``: a stand-in of the package that computes without a GPU."""
        return self.engine == "tensorrt-llm" and needs_gpu(self.tensorrt_llm or "")

"""The machine as a value: the facts that planning uses, as found by ``launch.probe``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that the caller may use."""

    index: int  # position among the caller's visible GPUs, as counted by --gpus
    uuid: str  # in the form of CUDA_VISIBLE_DEVICES: GPU-... or MIG-...
    name: str
    memory_bytes: int
    nvlink_peers: tuple[int, ...] = ()  # indices of the visible GPUs connected by NVLink
    memory_free_bytes: int | None = None  # free now; None: unknown
    numa_node: int | None = None  # None: unknown


@dataclass(frozen=True, slots=True)
class NumaNode:
    """The CPU cores that share a memory controller: for each core, the CPUs that are its threads."""

    index: int
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs in the caller's visible order, and the number of CPU cores that this process may use."""

    gpus: tuple[Gpu, ...] = ()
    cpu_cores: int = 1
    numa_nodes: tuple[NumaNode, ...] = ()  # empty: unknown
    cores_taken: str = ""  # why trtx must not pin processes to cores; "" if it may

"""The machine as a value: what ``launch.probe`` found, and all that planning may know about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that the caller may use."""

    index: int  # position in the caller's own visible set, which is what --gpus counts
    uuid: str  # as CUDA_VISIBLE_DEVICES takes it: GPU-... or MIG-...
    name: str
    memory_bytes: int
    nvlink_peers: tuple[int, ...] = ()  # indices of the visible GPUs that NVLink reaches
    memory_free_bytes: int | None = None  # now; None: not known


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs in the caller's visible order, and the CPU cores that this process may run on."""

    gpus: tuple[Gpu, ...] = ()
    cpu_cores: int = 1

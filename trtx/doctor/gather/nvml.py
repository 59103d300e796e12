"""Reads the state of GPUs from NVML, for the doctor and for measurements under load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from trtx.nvml import ClockReason, GpuEnergy, ask, clock_reasons, energy, utilization_percent, watts
from trtx.topology import TOPOLOGY_VARIABLE


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
    utilization_percent: float | None = None  # share of NVML's last sample period in which a kernel ran
    energy: GpuEnergy | None = None


@contextlib.contextmanager
def open_gpus(uuids: Sequence[str]) -> Iterator[Callable[[], tuple[GpuState, ...]] | None]:
    """Yields a function that reads the state of these GPUs, in order; None if NVML does not know one of them.

    Each call reports utilization since the previous call. NVML may be called from any thread.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    since_us = _now_us()

    def read() -> tuple[GpuState, ...]:
        nonlocal since_us
        before, since_us = since_us, _now_us()
        return tuple(gpu_state(handle, before) for handle in handles or ())

    try:
        handles = ask(lambda: [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
        yield None if handles is None else read
    finally:
        pynvml.nvmlShutdown()


def _now_us() -> int:
    return time.time_ns() // 1000


def gpu_state(handle: Any, since_us: int | None = None) -> GpuState:
    """Returns the current state of a GPU. NVML must be initialised.

    ``since_us``: the start of the utilization samples, in µs since 1970; None: no utilization.
    """
    memory = ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return GpuState(
        sm_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        clock_reasons=clock_reasons(handle),
        power_w=watts(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        temperature_c=ask(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        memory_used_bytes=None if memory is None else int(memory.used),
        processes=_processes(handle, {} if since_us is None else _sm_percent(handle, since_us)),
        utilization_percent=utilization_percent(handle),
        energy=energy(handle),
    )


def _processes(handle: Any, sm_percent: Mapping[int, float]) -> tuple[GpuProcess, ...] | None:
    found = ask(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if found is None:
        return None
    return tuple(_process(entry.pid, entry.usedGpuMemory, sm_percent.get(entry.pid)) for entry in found)


def _process(pid: int, memory_bytes: int | None, sm_percent: float | None) -> GpuProcess:
    try:
        process = psutil.Process(pid)
        name: str | None = process.name()
    except psutil.Error:
        return GpuProcess(pid, None, memory_bytes, sm_percent=sm_percent)
    try:
        topology = process.environ().get(TOPOLOGY_VARIABLE)
    except psutil.Error:
        topology = None
    return GpuProcess(pid, name, memory_bytes, topology, sm_percent)


def _sm_percent(handle: Any, since_us: int) -> dict[int, float]:
    """Returns the maximum SM utilization by pid since ``since_us``; empty if NVML has no samples (MIG slices)."""
    found: dict[int, float] = {}
    for sample in ask(lambda: pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)) or []:
        found[sample.pid] = max(found.get(sample.pid, 0.0), float(sample.smUtil))
    return found

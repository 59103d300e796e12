"""Readings of NVIDIA GPUs through NVML, which needs no CUDA context.

NVML must be initialised by the caller. A value that the GPU, the driver or the permissions don't give is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pynvml

T = TypeVar("T")

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
CLOCK_REASONS: dict[int, ClockReason] = {
    pynvml.nvmlClocksEventReasonGpuIdle: "idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal, by software",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "thermal, by hardware",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clocks",
}
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_FIELDS = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
_KIB = 1024


def ask(question: Callable[[], T]) -> T | None:
    """Calls an NVML function; returns None if the GPU, the driver or the permissions don't allow it."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def watts(question: Callable[[], int]) -> float | None:
    milliwatts = ask(question)
    return None if milliwatts is None else milliwatts / 1000


@dataclass(frozen=True, slots=True)
class GpuEnergy:
    """A GPU's counter of its energy since the driver was loaded, and when it was read."""

    joules: float
    at_ns: int  # ns since 1970


def energy(handle: Any) -> GpuEnergy | None:
    """Reads the energy counter, which only Volta and newer GPUs have."""
    before_ns = time.time_ns()
    millijoules = ask(lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    return None if millijoules is None else GpuEnergy(millijoules / 1000, (before_ns + time.time_ns()) // 2)


def utilization_percent(handle: Any) -> float | None:
    """The share of NVML's last sample period (1/6 s to 1 s) in which a kernel ran, in %."""
    rates = ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return None if rates is None else float(rates.gpu)


def clock_reasons(handle: Any) -> tuple[ClockReason, ...] | None:
    """What keeps the clocks of a GPU below their maximum."""
    bits = ask(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    return None if bits is None else tuple(name for bit, name in CLOCK_REASONS.items() if bits & bit)


def visible_handle(entry: str) -> Any:
    """NVML's handle of a GPU, given as in ``CUDA_VISIBLE_DEVICES``: by index or by full UUID. Raises NVMLError."""
    return pynvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(entry)


@dataclass(frozen=True, slots=True)
class GpuCounters:
    """One reading of a GPU for its metrics. Counts run since the driver was loaded."""

    utilization: float | None  # share of NVML's last sample period, 0 to 1
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    energy_j: float | None
    temperature_c: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    corrected_errors: int | None
    uncorrected_errors: int | None
    clock_reasons: tuple[ClockReason, ...] | None
    nvlink_sent_bytes: int | None
    nvlink_received_bytes: int | None


def read_counters(handle: Any) -> GpuCounters:
    """Reads utilization, memory, energy and NVLink traffic of a GPU; None for what NVML does not report."""
    percent, consumed = utilization_percent(handle), energy(handle)
    memory = ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    sent, received = _nvlink_bytes(handle)
    return GpuCounters(
        utilization=None if percent is None else percent / 100,
        sm_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        memory_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        power_w=watts(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        energy_j=None if consumed is None else consumed.joules,
        temperature_c=ask(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        corrected_errors=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_errors=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        clock_reasons=clock_reasons(handle),
        nvlink_sent_bytes=sent,
        nvlink_received_bytes=received,
    )


def _ecc_errors(handle: Any, kind: int) -> int | None:
    return ask(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC)))


def _nvlink_bytes(handle: Any) -> tuple[int | None, int | None]:
    """Bytes sent and received over all NVLinks, which NVML counts in KiB; None for a GPU without NVLink."""
    fields = [(field, _ALL_LINKS) for field in _NVLINK_FIELDS]
    found = ask(lambda: pynvml.nvmlDeviceGetFieldValues(handle, fields))
    if found is None:
        return None, None
    sent, received = (int(one.value.ullVal) * _KIB if one.nvmlReturn == pynvml.NVML_SUCCESS else None for one in found)
    return sent, received

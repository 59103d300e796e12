"""Metrics of the GPUs that a worker may use, read through NVML at each scrape and never in an engine step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from trtx.engine.served_family import ServedFamily
from trtx.nvml import CLOCK_REASONS, ClockReason, GpuCounters, read_counters, visible_handle
from trtx.worker.devices import visible_entries
from trtx.worker.served_families import gpu_and_process_families

_HERTZ = 1e6
_Value = Callable[[GpuCounters], float | None]


def _hertz(mhz: int | None) -> float | None:
    return None if mhz is None else mhz * _HERTZ


def _whether(reason: ClockReason) -> _Value:
    return lambda gpu: None if gpu.clock_reasons is None else reason in gpu.clock_reasons


_VALUES: tuple[tuple[ServedFamily, _Value], ...] = (
    (gpu_and_process_families.GPU_UTILIZATION, lambda gpu: gpu.utilization),
    (gpu_and_process_families.GPU_SM_CLOCK, lambda gpu: _hertz(gpu.sm_clock_mhz)),
    (gpu_and_process_families.GPU_MAX_SM_CLOCK, lambda gpu: _hertz(gpu.max_sm_clock_mhz)),
    (gpu_and_process_families.GPU_MEMORY_CLOCK, lambda gpu: _hertz(gpu.memory_clock_mhz)),
    (gpu_and_process_families.GPU_POWER, lambda gpu: gpu.power_w),
    (gpu_and_process_families.GPU_ENERGY, lambda gpu: gpu.energy_j),
    (gpu_and_process_families.GPU_TEMPERATURE, lambda gpu: gpu.temperature_c),
    (gpu_and_process_families.GPU_MEMORY_USED, lambda gpu: gpu.memory_used_bytes),
    (gpu_and_process_families.GPU_MEMORY_TOTAL, lambda gpu: gpu.memory_total_bytes),
)
_LABELLED: tuple[tuple[ServedFamily, dict[str, _Value]], ...] = (
    (
        gpu_and_process_families.GPU_ECC_ERRORS,
        {"corrected": lambda gpu: gpu.corrected_errors, "uncorrected": lambda gpu: gpu.uncorrected_errors},
    ),
    (
        gpu_and_process_families.GPU_NVLINK_BYTES,
        {"sent": lambda gpu: gpu.nvlink_sent_bytes, "received": lambda gpu: gpu.nvlink_received_bytes},
    ),
    (gpu_and_process_families.GPU_CLOCK_REASON, {reason: _whether(reason) for reason in CLOCK_REASONS.values()}),
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    labels: tuple[str, str]  # index, UUID
    handle: Any


class GpuMetrics:
    """The GPU families of one worker. A value that NVML does not report has no sample.

    NVML stays initialised from the first reading on, because its initialisation takes longer than a reading.
    """

    def __init__(self) -> None:
        self._gpus: Sequence[_Gpu] | None = None

    def collect(self) -> Iterator[Any]:
        if self._gpus is None:
            self._gpus = _open()
        readings = [(gpu.labels, read_counters(gpu.handle)) for gpu in self._gpus]
        for family, value in _VALUES:
            yield from _family(family, [(labels, value(counters)) for labels, counters in readings])
        for family, values in _LABELLED:
            yield from _family(
                family,
                [((*labels, name), value(counters)) for labels, counters in readings for name, value in values.items()],
            )


def _family(family: ServedFamily, samples: Sequence[tuple[tuple[str, ...], float | None]]) -> Iterator[Any]:
    known = [(labels, float(value)) for labels, value in samples if value is not None]
    if known:
        yield family.family(known)


def _open() -> Sequence[_Gpu]:
    """The GPUs of this worker; none without NVML, or if NVML does not know one of them."""
    entries = visible_entries()
    if not entries:
        return ()
    try:
        pynvml.nvmlInit()
        return [_gpu(visible_handle(entry)) for entry in entries]
    except pynvml.NVMLError:
        return ()


def _gpu(handle: Any) -> _Gpu:
    return _Gpu((str(pynvml.nvmlDeviceGetIndex(handle)), str(pynvml.nvmlDeviceGetUUID(handle))), handle)

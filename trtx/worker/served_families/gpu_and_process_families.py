"""Metric families of a worker's processes and GPUs."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import ServedFamily, recorded

_GPU = "if NVML gives the value for a GPU of the worker"

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

# --- processes: prometheus_client's names, with one label more ---

PROCESS_MEMORY = _family(
    "gauge", "process_resident_memory_bytes", "bytes", "Resident memory of the worker's process.", "process"
)
PROCESS_CPU = _family(
    "counter", "process_cpu_seconds_total", "seconds", "User and system CPU time of the process.", "process"
)
PROCESS_FDS = _family("gauge", "process_open_fds", "descriptors", "Open file descriptors of the process.", "process")
PROCESS_START = _family(
    "gauge", "process_start_time_seconds", "seconds", "Start time of the process, as Unix time.", "process"
)

# --- GPUs: as NVML reports them at each scrape ---

_GPU_LABELS = ("gpu", "uuid")

GPU_UTILIZATION = _family(
    "gauge",
    "trtx_gpu_utilization_ratio",
    "share",
    "Share of NVML's last sample period in which a kernel ran.",
    *_GPU_LABELS,
    when=_GPU,
)
GPU_SM_CLOCK = _family(
    "gauge", "trtx_gpu_sm_clock_hertz", "hertz", "Current clock of the multiprocessors.", *_GPU_LABELS, when=_GPU
)
GPU_MAX_SM_CLOCK = _family(
    "gauge", "trtx_gpu_max_sm_clock_hertz", "hertz", "Highest clock of the multiprocessors.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_CLOCK = _family(
    "gauge", "trtx_gpu_memory_clock_hertz", "hertz", "Current clock of the memory.", *_GPU_LABELS, when=_GPU
)
GPU_POWER = _family("gauge", "trtx_gpu_power_watts", "watts", "Power draw of the board.", *_GPU_LABELS, when=_GPU)
GPU_ENERGY = _family(
    "counter",
    "trtx_gpu_energy_joules_total",
    "joules",
    "Energy since the driver was loaded.",
    *_GPU_LABELS,
    when=_GPU,
)
GPU_TEMPERATURE = _family(
    "gauge", "trtx_gpu_temperature_celsius", "celsius", "Temperature of the GPU.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_USED = _family(
    "gauge", "trtx_gpu_memory_used_bytes", "bytes", "Used memory, by all processes.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_TOTAL = _family(
    "gauge", "trtx_gpu_memory_total_bytes", "bytes", "Memory of the GPU.", *_GPU_LABELS, when=_GPU
)
GPU_ECC_ERRORS = _family(
    "counter",
    "trtx_gpu_ecc_errors_total",
    "errors",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    *_GPU_LABELS,
    "type",
    when=_GPU,
)
GPU_CLOCK_REASON = _family(
    "gauge",
    "trtx_gpu_clock_reason",
    "boolean",
    "1 if this reason now keeps the clocks below their maximum, else 0.",
    *_GPU_LABELS,
    "reason",
    when=_GPU,
)
GPU_NVLINK_BYTES = _family(
    "counter",
    "trtx_gpu_nvlink_bytes_total",
    "bytes",
    "Data over all NVLinks of the GPU, by direction: sent or received.",
    *_GPU_LABELS,
    "direction",
    when=_GPU,
)

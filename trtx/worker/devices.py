"""The GPUs that this worker may use, read through NVML so that CUDA is not initialised."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class WorkerGpu:
    uuid: str
    name: str


def given_gpus() -> tuple[WorkerGpu, ...] | None:
    """The GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; an empty tuple if the variable is empty.

    Returns None if the variable is not set, or if NVML does not know one of its entries.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    entries = [entry for part in visible.split(",") if (entry := part.strip())]
    if not entries:
        return ()
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_gpu(_handle(entry)) for entry in entries)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _gpu(handle: Any) -> WorkerGpu:
    return WorkerGpu(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle)))


def _handle(entry: str) -> Any:
    """Returns NVML's handle of a GPU, given by index or by full UUID, as the launcher passes it. Raises NVMLError."""
    return pynvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(entry)

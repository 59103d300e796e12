"""The GPUs that this worker may use, read through NVML so that CUDA is not initialised."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml

from trtx.nvml import visible_handle


@dataclass(frozen=True, slots=True)
class WorkerGpu:
    uuid: str
    name: str


def given_gpus() -> tuple[WorkerGpu, ...] | None:
    """The GPUs in ``CUDA_VISIBLE_DEVICES``, in its order; an empty tuple if the variable is empty.

    Returns None if the variable is not set, or if NVML does not know one of its entries.
    """
    entries = visible_entries()
    if entries is None:
        return None
    if not entries:
        return ()
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_gpu(visible_handle(entry)) for entry in entries)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def visible_entries() -> list[str] | None:
    """The entries of ``CUDA_VISIBLE_DEVICES``; None if the variable is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return [entry for part in visible.split(",") if (entry := part.strip())]


def _gpu(handle: Any) -> WorkerGpu:
    return WorkerGpu(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle)))

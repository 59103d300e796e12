"""Which GPUs this worker was given, asked of NVML: nothing here starts CUDA."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    name: str


def given_gpus() -> tuple[Gpu, ...] | None:
    """One for each entry of ``CUDA_VISIBLE_DEVICES``, none where it is empty.

    None: it is not set, so nobody said, or it names what NVML does not know.
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


def _gpu(handle: Any) -> Gpu:
    return Gpu(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle)))


def _handle(entry: str) -> Any:
    """Of an index or a UUID; the launcher gives whole UUIDs. Raises NVMLError."""
    return pynvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(entry)

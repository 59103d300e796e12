"""Resolves the torch device of an engine process or an encoder process, and measures its memory."""

from __future__ import annotations

import torch

from trtx.errors import UsageError


def resolve_device(name: str) -> torch.device:
    """Returns the device for ``auto``, ``cpu`` or ``cuda:<index>``.

    Raises UsageError for any other name, and for CUDA where torch does not find it.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known; expected auto, cpu or cuda:<index>") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {name!r} needs CUDA, which torch {torch.__version__} does not find; use cpu")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise UsageError(f"device {name!r} is not supported; expected auto, cpu or cuda:<index>")
    return device


def device_memory_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator has reserved on the device, without CUDA's own context; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

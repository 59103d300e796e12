"""Ranges of addresses whose memory can be released and allocated again.

A tensor over a region keeps its address while the memory is away, so pointers that CUDA graphs have captured stay
valid. Nothing may read or write such a tensor in the meantime.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor


class Region(Protocol):
    """One range of addresses, with memory or without."""

    bytes: Tensor  # uint8, one-dimensional

    def release(self) -> None:
        """Releases the memory to the system. Idempotent. On a GPU, no work that uses the memory may be in flight."""

    def restore(self) -> None:
        """Allocates zeroed memory for the range again. A range that has memory keeps its contents.

        Raises OutOfDeviceMemory (:mod:`trtx.torch_engine.runner.cuda_regions`), and leaves the range without memory, if
        the device has too little.
        """

    def close(self) -> None:
        """Frees the range for good; no tensor over it may be used again."""


class HostRegion:
    """A :class:`Region` in host memory: the kernel drops its pages, and gives zeroed ones at the next access."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        pass

    def close(self) -> None:
        self.release()


def open_region(num_bytes: int, device: torch.device) -> Region:
    """Returns a zeroed region of at least ``num_bytes``. Raises UsageError without ``cuda-bindings`` on a GPU."""
    if device.type == "cpu":
        return HostRegion(num_bytes)
    from trtx.torch_engine.runner.cuda_regions import CudaRegion

    return CudaRegion(num_bytes, device)

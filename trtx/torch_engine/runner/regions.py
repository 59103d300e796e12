"""Ranges of addresses whose memory can be released and allocated again, or mapped by other processes too.

A tensor over a region keeps its address while the memory is away, so pointers that CUDA graphs have captured stay
valid. Nothing may read or write such a tensor in the meantime.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

_ALIGNMENT = 256  # of the tensors in a region
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>; Python has no name for it


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


class SharedRegion(Protocol):
    """Memory that several processes map. It exists until the last process has closed its mapping and its descriptor, or
    has ended.
    """

    bytes: Tensor  # uint8, one-dimensional
    descriptor: int  # another process maps the memory with it; this object owns it

    def seal(self) -> None:
        """Ends the writing. Call it once, in the process that created the memory, before others get the descriptor."""

    def close(self) -> None:
        """Unmaps the memory, and closes the descriptor; no tensor over it may be used again."""


class SharedHostRegion:
    """A :class:`SharedRegion` in host memory. It has no file, so a killed process leaves nothing behind."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """Creates zeroed memory, or maps that of ``descriptor`` for reading and takes the descriptor over.

        Raises ValueError if the memory of ``descriptor`` is smaller.
        """
        is_new = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("trtx-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, num_bytes)
        self.descriptor = descriptor
        access = mmap.PROT_READ | mmap.PROT_WRITE if is_new else mmap.PROT_READ
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def seal(self) -> None:
        """Makes the size final, and all later mappings read-only."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        os.close(self.descriptor)  # the mapping goes with its last tensor


def open_region(num_bytes: int, device: torch.device) -> Region:
    """Returns a zeroed region of at least ``num_bytes``. Raises UsageError without ``cuda-bindings`` on a GPU."""
    if device.type == "cpu":
        return HostRegion(num_bytes)
    from trtx.torch_engine.runner.cuda_regions import CudaRegion

    return CudaRegion(num_bytes, device)


def zeroed_tensors(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, sleeps: bool
) -> tuple[Region | None, list[Tensor]]:
    """Returns a tensor of each shape, and the region that they share if their memory can be released.

    Zeros, because a masked position must not hold a NaN, as uninitialized memory could.
    """
    if not sleeps:
        return None, [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    region = open_region(sum(sizes), device)
    begins = accumulate(sizes, initial=0)
    return region, [
        region.bytes[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for begin, shape in zip(begins, shapes, strict=False)
    ]


def create_shared_region(num_bytes: int, device: torch.device) -> SharedRegion:
    """Returns a zeroed region of at least ``num_bytes``. Raises UsageError without ``cuda-bindings`` on a GPU."""
    if device.type == "cpu":
        return SharedHostRegion(num_bytes)
    from trtx.torch_engine.runner.cuda_regions import SharedCudaRegion

    return SharedCudaRegion(num_bytes, device)


def map_shared_region(num_bytes: int, device: torch.device, descriptor: int) -> SharedRegion:
    """Maps a region of another process for reading, and takes ``descriptor`` over.

    Raises MappingRefused (:mod:`trtx.torch_engine.runner.cuda_regions`) or ValueError if it can't be mapped.
    """
    if device.type == "cpu":
        return SharedHostRegion(num_bytes, descriptor)
    from trtx.torch_engine.runner.cuda_regions import SharedCudaRegion

    return SharedCudaRegion(num_bytes, device, descriptor)

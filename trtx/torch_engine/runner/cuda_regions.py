"""Regions in GPU memory, by the driver's virtual memory management."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtx.errors import UsageError


class OutOfDeviceMemory(Exception):
    """The GPU has too little free memory for a region."""


class MappingRefused(Exception):
    """The driver can't map another process's memory."""


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(
            f"sleep_config and --share-weights need the package cuda-bindings on a GPU, which can't be imported "
            f"({error}); install it, or leave them out"
        ) from error
    return driver


class _Reservation:
    """A range of addresses on one GPU, and its mapping. Sizes are multiples of the driver's granularity."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.cuda = cuda = _driver()
        self.device = device
        self.size = num_bytes
        torch.cuda.synchronize(device)  # creates the context, if this is the process's first use of the GPU
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index or 0
        # For other processes of the host: CudaDriver.export of the KV pool, and SharedCudaRegion.
        properties.requestedHandleTypes = self.handle_type
        number = self.call("cuDeviceGet", device.index or 0)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(bool(self.call("cuDeviceGetAttribute", attribute, number)))
        self._properties = properties
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self.call("cuMemGetAllocationGranularity", properties, minimum)
        self.size = -(-num_bytes // granularity) * granularity
        self.address = int(self.call("cuMemAddressReserve", self.size, 0, 0, 0))

    @property
    def handle_type(self) -> Any:
        return self.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def allocate(self) -> Any:
        """Returns the handle of new memory. Raises OutOfDeviceMemory."""
        return self.call("cuMemCreate", self.size, self._properties, 0)

    def map(self, handle: Any, *, writable: bool = True) -> None:
        """Maps the memory of ``handle``, and releases the handle if that fails."""
        flags = self.cuda.CUmemAccess_flags
        access = self.cuda.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        try:
            self.call("cuMemMap", self.address, self.size, 0, handle, 0)
            self.call("cuMemSetAccess", self.address, self.size, [access], 1)
        except BaseException:
            self.cuda.cuMemUnmap(self.address, self.size)
            self.cuda.cuMemRelease(handle)
            raise

    def unmap(self, handle: Any) -> None:
        torch.cuda.synchronize(self.device)
        self.call("cuMemUnmap", self.address, self.size)
        self.call("cuMemRelease", handle)

    def free(self) -> None:
        self.call("cuMemAddressFree", self.address, self.size)

    def tensor(self, num_bytes: int) -> Tensor:
        described = {"shape": (num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=self.device)

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.cuda, name)(*arguments)
        if code == self.cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self.device)
            raise OutOfDeviceMemory(f"{self.size >> 20} MiB are needed and {free >> 20} MiB are free")
        if code != self.cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {code!r}")
        return values[0] if values else None


class CudaRegion:
    """A :class:`~trtx.torch_engine.runner.regions.Region` on a GPU: one reservation, and one allocation while it has
    memory.

    The allocation can be registered for GPUDirect RDMA where the GPU supports it. It has no CUDA IPC handle: other
    processes of the host can't map it as they map memory from ``cudaMalloc``.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._range = _Reservation(num_bytes, device)
        self._handle: Any = None  # None: without memory
        self._map()
        self.bytes = self._range.tensor(num_bytes)
        self.bytes.zero_()

    def release(self) -> None:
        if self._handle is None:
            return
        self._range.unmap(self._handle)
        self._handle = None

    def restore(self) -> None:
        if self._handle is None:
            self._map()
            self.bytes.zero_()

    def close(self) -> None:
        self.release()
        self._range.free()

    def _map(self) -> None:
        handle = self._range.allocate()
        self._range.map(handle)
        self._handle = handle


class SharedCudaRegion:
    """A :class:`~trtx.torch_engine.runner.regions.SharedRegion` on a GPU.

    Memory from ``cudaMalloc`` would not do: its CUDA IPC mappings are undefined once the process that allocated it has
    ended. This memory is counted by the driver, as a file's is by the kernel.
    """

    def __init__(self, num_bytes: int, device: torch.device, descriptor: int | None = None) -> None:
        """Creates zeroed memory, or maps that of ``descriptor`` for reading and takes the descriptor over.

        Raises OutOfDeviceMemory for new memory, and MappingRefused for that of a descriptor.
        """
        self._range = _Reservation(num_bytes, device)
        if descriptor is None:
            self._handle = self._range.allocate()
            self._range.map(self._handle)
            self.descriptor = int(
                self._range.call("cuMemExportToShareableHandle", self._handle, self._range.handle_type, 0)
            )
            self.bytes = self._range.tensor(num_bytes)
            self.bytes.zero_()
            return
        try:
            self._handle = self._range.call("cuMemImportFromShareableHandle", descriptor, self._range.handle_type)
            self._range.map(self._handle, writable=False)
        except (RuntimeError, OutOfDeviceMemory) as error:
            self._range.free()
            os.close(descriptor)
            raise MappingRefused(str(error)) from error
        self.descriptor = descriptor
        self.bytes = self._range.tensor(num_bytes)

    def seal(self) -> None:
        """Waits until all writes have ended, because CUDA does not order other processes' kernels after them."""
        torch.cuda.synchronize(self._range.device)

    def close(self) -> None:
        self._range.unmap(self._handle)
        self._range.free()
        os.close(self.descriptor)

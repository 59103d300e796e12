"""Regions in GPU memory, by the driver's virtual memory management."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trtx.errors import UsageError


class OutOfDeviceMemory(Exception):
    """The GPU has too little free memory for a region."""


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(
            f"sleep_config needs the package cuda-bindings on a GPU, which can't be imported ({error}); install it, or "
            "leave sleep_config out"
        ) from error
    return driver


class CudaRegion:
    """A :class:`~trtx.torch_engine.runner.regions.Region` on a GPU: one reservation, and one allocation while it has
    memory.

    The allocation can be registered for GPUDirect RDMA where the GPU supports it. It has no CUDA IPC handle: other
    processes of the host can't map it as they map memory from ``cudaMalloc``.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._cuda = cuda = _driver()
        self._device = device
        self._size = num_bytes
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index or 0
        # For peers of the same host: see CudaDriver.export.
        properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        number = self._call("cuDeviceGet", device.index or 0)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(bool(self._call("cuDeviceGetAttribute", attribute, number)))
        self._properties = properties
        self._access = cuda.CUmemAccessDesc()
        self._access.location = properties.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", properties, minimum)
        self._size = -(-num_bytes // granularity) * granularity
        self._handle: Any = None  # None: without memory
        self._address = int(self._call("cuMemAddressReserve", self._size, 0, 0, 0))
        self._map()
        described = {"shape": (num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}
        self.bytes = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)
        self.bytes.zero_()

    def release(self) -> None:
        if self._handle is None:
            return
        torch.cuda.synchronize(self._device)
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self._handle = None

    def restore(self) -> None:
        if self._handle is None:
            self._map()
            self.bytes.zero_()

    def close(self) -> None:
        self.release()
        self._call("cuMemAddressFree", self._address, self._size)

    def _map(self) -> None:
        handle = self._call("cuMemCreate", self._size, self._properties, 0)
        try:
            self._call("cuMemMap", self._address, self._size, 0, handle, 0)
            self._call("cuMemSetAccess", self._address, self._size, [self._access], 1)
        except BaseException:
            self._cuda.cuMemUnmap(self._address, self._size)
            self._cuda.cuMemRelease(handle)
            raise
        self._handle = handle

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._cuda, name)(*arguments)
        if code == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise OutOfDeviceMemory(f"{self._size >> 20} MiB are needed and {free >> 20} MiB are free")
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {code!r}")
        return values[0] if values else None

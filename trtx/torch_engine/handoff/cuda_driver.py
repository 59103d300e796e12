"""The calls of the CUDA driver for memory handles between processes, for which torch has no public API.

It uses ctypes: the driver is present wherever torch finds a GPU, and its ABI does not change.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_FILE = struct.Struct("<iQ")  # the handle of memory that was created and mapped: the exporter's descriptor, its size
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE, _READ_AND_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PIDFD_GETFD = 438  # the system call's number, the same on all architectures


class CudaError(Exception):
    """A driver call failed; the text has the call and the driver's error."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the locations are hints for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class CudaDriver:
    """The CUDA driver, with the context that was current at construction."""

    def __init__(self) -> None:
        self._exported: list[int] = []  # descriptors, which keep their memory allocated
        self._mapped: dict[int, int] = {}  # sizes of other processes' memory, by its address in this process
        self._library = ctypes.CDLL("libcuda.so.1")
        # Declared argument types accept plain ints and save 3 us for each call, which is part of a read's latency.
        self._library.cuMemcpyHtoDAsync_v2.argtypes = [
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def adopt_thread(self) -> None:
        """Makes the context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]:
        """Returns (handle of the allocation that contains the memory at ``address``, offset of ``address`` in it).

        The handle of memory that was created and mapped (:mod:`trtx.torch_engine.runner.cuda_regions`) is a descriptor
        of this process, which keeps the memory allocated until :meth:`close_exports`. Raises CudaError for memory that
        has no handle, or has several: torch's ``expandable_segments`` map a tensor in pieces.
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if address + num_bytes > base.value + size.value:
            raise CudaError("the memory was mapped in pieces, as torch's expandable_segments do")
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except CudaError:
            return self._export_mapped(base.value, size.value), address - base.value
        return bytes(handle), address - base.value

    def _export_mapped(self, base: int, size: int) -> bytes:
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(base))
        try:
            self._call(
                "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, ctypes.c_int(_FILE_DESCRIPTOR),
                ctypes.c_ulonglong(0),
            )  # fmt: skip
        finally:
            self._call("cuMemRelease", handle)
        self._exported.append(descriptor.value)
        return _FILE.pack(descriptor.value, size)

    def close_exports(self) -> None:
        """Closes the descriptors of :meth:`export`; processes that have opened them keep their mappings."""
        while self._exported:
            os.close(self._exported.pop())

    def open(self, handle: bytes, pid: int) -> int:
        """Maps an allocation of process ``pid`` and returns its local address. Open a handle at most once at a time.

        Raises CudaError, also if this process may not take the other process's descriptor.
        """
        if len(handle) == _FILE.size:
            descriptor, size = _FILE.unpack(handle)
            return self._map(_take_descriptor(pid, descriptor), size)
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle of {len(handle)} bytes; CUDA's have {HANDLE_BYTES}")
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )  # fmt: skip
        return address.value

    def _map(self, descriptor: int, size: int) -> int:
        """Maps created memory, and closes its descriptor."""
        handle, address, device = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
        whole, none = ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuCtxGetDevice", ctypes.byref(device))
        try:
            self._call(
                "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor),
                ctypes.c_int(_FILE_DESCRIPTOR),
            )  # fmt: skip
        finally:
            os.close(descriptor)
        try:
            self._call(
                "cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), ctypes.c_uint64(0), none
            )
            self._call("cuMemMap", address, whole, ctypes.c_size_t(0), handle, none)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        self._mapped[address.value] = size
        access = _Access(_ON_DEVICE, device.value, _READ_AND_WRITE)
        try:
            self._call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
        except CudaError:
            self.close(address.value)
            raise
        return address.value

    def close(self, address: int) -> None:
        size = self._mapped.pop(address, None)
        if size is None:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            return
        for name in ("cuMemUnmap", "cuMemAddressFree"):
            self._call(name, ctypes.c_uint64(address), ctypes.c_size_t(size))

    @property
    def copies_batches(self) -> bool:
        """Whether ``copy_batch`` is available: since the driver of CUDA 12.8."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueues ``len(targets)`` copies between mapped addresses, in no particular order. No kernel runs."""
        attributes, first, failed = _CopyAttributes(source_order=_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t()
        self._call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            ctypes.c_size_t(len(targets)), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1),
            ctypes.byref(failed), ctypes.c_void_p(stream),
        )  # fmt: skip

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy between mapped addresses on any devices."""
        self._call(
            "cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream),
        )  # fmt: skip

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy from pinned host memory."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _take_descriptor(pid: int, descriptor: int) -> int:
    """Duplicates a descriptor of another process into this one. Raises CudaError if the kernel does not allow it.

    The kernel requires a debugger's rights, as for :class:`trtx.torch_engine.handoff.memory.ProcessMemory`.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise CudaError(f"process {pid} can't be opened: {error.strerror}") from error
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = int(libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
        if taken < 0:
            raise CudaError(f"a descriptor of process {pid} can't be taken: {os.strerror(ctypes.get_errno())}")
        return taken
    finally:
        os.close(process)

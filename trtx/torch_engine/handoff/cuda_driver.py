"""The calls of the CUDA driver for memory handles between processes, for which torch has no public API.

It uses ctypes: the driver is present wherever torch finds a GPU, and its ABI does not change.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


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


class CudaDriver:
    """The CUDA driver, with the context that was current at construction."""

    def __init__(self) -> None:
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

    def export(self, address: int) -> tuple[bytes, int]:
        """Returns (handle of the allocation that contains ``address``, offset of ``address`` in it).

        Raises CudaError for memory that has no handle, such as torch's ``expandable_segments``.
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation and returns its local address. Open a handle at most once at a time."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )  # fmt: skip
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

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

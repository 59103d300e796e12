"""Access to the KV pool of another process on the same host, and its implementation for CPU memory."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.head_share import CopySpans
from trtx.torch_engine.handoff.reads import BlockIds

if TYPE_CHECKING:
    import torch

_IOV_MAX = 1024  # <limits.h>: pieces of one process_vm_readv


class MemoryUnreachable(Exception):
    """The other process's memory can't be opened from here: use another transport."""


class CopyFailed(Exception):
    """The other process's memory was reachable, but no longer is."""


class SharedMemory(Protocol):
    """Memory that other processes can open, and the means to open theirs."""

    kind: str  # DirectOffer.memory
    handle: bytes  # DirectOffer.handle and .offset of the local pool
    offset: int

    def adopt_thread(self) -> None:
        """Prepares the calling thread for ``open`` and ``shut``."""

    def open(self, offer: DirectOffer, pid: int) -> Any:
        """Makes the pool of process ``pid`` readable. Raises MemoryUnreachable. May take milliseconds."""

    def shut(self, pool: Any) -> None:
        """Closes an opened pool, with no copy from it in flight.

        The other process can free its memory only after that.
        """


class PoolMemory(SharedMemory, Protocol):
    """Copies blocks from other processes' pools into the local pool, by reading their memory.

    Only the engine's thread calls its methods, except ``adopt_thread`` and ``open``.
    """

    own: Any  # the local pool in the form that ``open`` returns

    def start(self, pool: Any, remote: BlockIds, local: BlockIds, spans: CopySpans) -> Any:
        """Starts to copy spans of blocks at once: no work enqueued earlier writes to them. Raises CopyFailed."""

    def is_done(self, copy: Any) -> bool:
        """Whether the copy has no reads or writes outstanding. Call it until it returns True, then never again."""

    def close(self) -> None:
        """Waits until every copy has ended."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """A KV pool in CPU memory. The kernel copies it (``process_vm_readv``) while ``start`` runs.

    The kernel requires a debugger's rights: the same user and, with Yama's ``ptrace_scope`` 1, a descendant process.
    """

    kind = "process"

    def __init__(self, pool: torch.Tensor, block_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._block_bytes = block_bytes
        self._address = pool.data_ptr()
        self.handle, self.offset = b"", pool.data_ptr()
        self.own = (os.getpid(), pool.data_ptr())

    def adopt_thread(self) -> None:
        pass

    def open(self, offer: DirectOffer, pid: int) -> tuple[int, int]:
        target = ctypes.create_string_buffer(1)
        try:
            self._read(pid, [ctypes.addressof(target)], [offer.offset], 1)
        except OSError as error:
            raise MemoryUnreachable(os.strerror(error.errno or 0)) from error
        return pid, offer.offset

    def shut(self, pool: tuple[int, int]) -> None:
        pass

    def start(self, pool: tuple[int, int], remote: BlockIds, local: BlockIds, spans: CopySpans) -> None:
        pid, base = pool
        sources = (remote.astype(np.int64) * spans.source_block + (base + spans.source)).tolist()
        targets = (local.astype(np.int64) * self._block_bytes + (self._address + spans.target)).tolist()
        try:
            for begin in range(0, len(sources), _IOV_MAX):
                part = slice(begin, begin + _IOV_MAX)
                self._read(pid, targets[part], sources[part], spans.length)
        except OSError as error:
            raise CopyFailed(os.strerror(error.errno or 0)) from error

    def _read(self, pid: int, targets: list[int], sources: list[int], length: int) -> None:
        """Reads whole pieces: the kernel stops early only at an unreadable piece, or at 2 GiB."""
        done, count = 0, len(sources)
        while done < count:
            pieces = _Piece * (count - done)
            here = pieces(*(_Piece(address, length) for address in targets[done:]))
            there = pieces(*(_Piece(address, length) for address in sources[done:]))
            moved = self._libc.process_vm_readv(pid, here, count - done, there, count - done, 0)
            if moved < 0:
                raise OSError(ctypes.get_errno(), "process_vm_readv")
            if moved < length:
                raise OSError(errno.EFAULT, "process_vm_readv")
            done += moved // length

    def is_done(self, copy: None) -> bool:
        return True

    def close(self) -> None:
        pass

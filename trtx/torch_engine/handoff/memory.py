"""How a process reaches into the pool of another one on the same host, and the way that needs no GPU."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.reads import BlockIds

if TYPE_CHECKING:
    import torch

_IOV_MAX = 1024  # <limits.h>: pieces of one process_vm_readv


class MemoryUnreachable(Exception):
    """The other process's memory cannot be opened from here: this is not a way to its pool."""


class CopyFailed(Exception):
    """The other process's memory was reachable and is not any more."""


class SharedMemory(Protocol):
    """Memory that other processes open, and the way to open theirs."""

    kind: str  # DirectOffer.memory
    handle: bytes  # DirectOffer.handle and .offset of the own pool
    offset: int

    def adopt_thread(self) -> None:
        """Prepares the calling thread for ``open`` and ``shut``."""

    def open(self, offer: DirectOffer, pid: int) -> Any:
        """Makes process ``pid``'s pool readable; raises MemoryUnreachable. May take milliseconds."""

    def shut(self, pool: Any) -> None:
        """Lets go of an opened pool, with no copy from it under way: its memory may be freed only after that."""


class PoolMemory(SharedMemory, Protocol):
    """Copies blocks from other processes' pools into the own one, by reading their memory.

    Every method but ``adopt_thread`` and ``open`` is called by the engine's thread alone.
    """

    own: Any  # the own pool in the form that ``open`` returns

    def start(self, pool: Any, remote: BlockIds, local: BlockIds) -> Any:
        """Starts to copy blocks at once: nothing that was enqueued before writes to them. Raises CopyFailed."""

    def is_done(self, copy: Any) -> bool:
        """Whether nothing reads or writes for this copy any more. To be asked until it is True, then no more."""

    def close(self) -> None:
        """Returns when every copy has ended."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """A pool in CPU memory, copied by the kernel (``process_vm_readv``) while ``start`` runs.

    The kernel asks for the rights of a debugger: the same user, and where Yama's ``ptrace_scope`` is 1 a descendant.
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

    def start(self, pool: tuple[int, int], remote: BlockIds, local: BlockIds) -> None:
        pid, base = pool
        sources = (remote.astype(np.int64) * self._block_bytes + base).tolist()
        targets = (local.astype(np.int64) * self._block_bytes + self._address).tolist()
        try:
            for begin in range(0, len(sources), _IOV_MAX):
                part = slice(begin, begin + _IOV_MAX)
                self._read(pid, targets[part], sources[part], self._block_bytes)
        except OSError as error:
            raise CopyFailed(os.strerror(error.errno or 0)) from error

    def _read(self, pid: int, targets: list[int], sources: list[int], length: int) -> None:
        """Whole pieces: the kernel stops short only at one that it cannot read, or at 2 GiB."""
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

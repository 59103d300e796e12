"""How an engine reads the arena of an encoder process: CUDA IPC between GPUs, ``process_vm_readv`` on CPUs."""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trtx.torch_engine.embeddings.arena import BLOCK_BYTES
from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError
from trtx.torch_engine.handoff.head_share import CopySpans
from trtx.torch_engine.handoff.memory import CopyFailed, MemoryUnreachable, ProcessMemory, SharedMemory


class PeerMemory(SharedMemory, Protocol):
    """Memory in blocks of :data:`BLOCK_BYTES`, and copies from other processes' memory."""

    def copy(self, opened: Any, blocks: Sequence[int], target: torch.Tensor) -> None:
        """Copies ``blocks`` of a pool that :meth:`open` returned, in order, into ``target``, and waits for the copy.

        ``target``: uint8 ``[len(blocks) * BLOCK_BYTES]`` on this process's device, used on the caller's current stream.
        Raises CopyFailed.
        """


def peer_memory(device: torch.device, pool: torch.Tensor | None = None) -> PeerMemory:
    """Returns the implementation for ``device``. ``pool``: memory for others to read; None: this process only reads.

    Raises MemoryUnreachable if no process can open this one's memory, or if this process can't open others'.
    """
    return CudaPeers(device, pool) if device.type == "cuda" else ProcessPeers(pool)


class ProcessPeers(ProcessMemory):
    """Uses ``process_vm_readv``: see :class:`~trtx.torch_engine.handoff.memory.ProcessMemory`."""

    def __init__(self, pool: torch.Tensor | None) -> None:
        super().__init__(torch.empty(0) if pool is None else pool, BLOCK_BYTES)

    def copy(self, opened: tuple[int, int], blocks: Sequence[int], target: torch.Tensor) -> None:
        remote, local = np.array(blocks, np.int32), np.arange(len(blocks), dtype=np.int32)
        ProcessMemory(target, BLOCK_BYTES).start(opened, remote, local, CopySpans.whole(BLOCK_BYTES))


class CudaPeers:
    """Maps other processes' arenas by CUDA IPC; copy engines read them over NVLink, or within one GPU.

    ``pool`` must come from cudaMalloc; see :class:`~trtx.torch_engine.handoff.cuda_driver.CudaDriver`.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, pool: torch.Tensor | None) -> None:
        torch.cuda.synchronize(device)  # creates a context, and waits for what fills the pool
        try:
            self._driver = CudaDriver()
            self.handle, self.offset = (b"", 0) if pool is None else self._driver.export(pool.data_ptr(), pool.nbytes)
        except (CudaError, OSError) as error:
            raise MemoryUnreachable(str(error)) from error
        if pool is not None and len(self.handle) != HANDLE_BYTES:
            self._driver.close_exports()
            raise MemoryUnreachable("the memory has no handle of CUDA IPC, as with torch's expandable_segments")

    def adopt_thread(self) -> None:
        self._driver.adopt_thread()

    def open(self, offer: DirectOffer, pid: int) -> tuple[int, int]:
        """Returns (address for CudaDriver.close, address of block 0)."""
        if len(offer.handle) != HANDLE_BYTES:
            raise MemoryUnreachable(f"a handle of {len(offer.handle)} bytes; CUDA's have {HANDLE_BYTES}")
        try:
            base = self._driver.open(offer.handle, pid)
        except CudaError as error:
            raise MemoryUnreachable(str(error)) from error
        return base, base + offer.offset

    def shut(self, opened: tuple[int, int]) -> None:
        self._driver.close(opened[0])

    def copy(self, opened: tuple[int, int], blocks: Sequence[int], target: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(target.device)
        try:
            written = target.data_ptr()
            for first, count in runs(blocks):
                size = count * BLOCK_BYTES
                self._driver.copy(written, opened[1] + first * BLOCK_BYTES, size, stream.cuda_stream)
                written += size
            stream.synchronize()
        except (CudaError, RuntimeError) as error:
            raise CopyFailed(str(error)) from error


def runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Merges consecutive blocks into runs: (first block, number of blocks)."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and sum(found[-1]) == block:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((block, 1))
    return found

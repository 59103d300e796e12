"""A KV pool in GPU memory: CUDA IPC maps other processes' pools, and blocks are copied over NVLink."""

# torch leaves its streams and events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.cuda_driver import CudaDriver, CudaError
from trtx.torch_engine.handoff.head_share import CopySpans
from trtx.torch_engine.handoff.memory import MemoryUnreachable
from trtx.torch_engine.handoff.reads import BlockIds

BATCHED_BYTES = 400_000_000
"""Size from which the copy engines are faster than the kernel, which starts sooner (docs/performance-notes.md)."""

COPY_STREAMS = 4
"""Number of copy engines that work on one read: each of them pauses between blocks."""

WORD_BYTES = 8  # size of the kernel's elements; it loads two at once
TILE, WARPS, PROGRAMS = 8192, 8, 32
"""The kernel's tile, warps and programs.

More programs are not faster, and a concurrent decode step waits for their SMs.
"""

_IDS = 4096  # initial capacity of a ticket: 2,048 blocks


@dataclass(slots=True, eq=False)
class _Ticket:
    """Buffers and event of one copy: its ids on host and device, and the event after it. Reused once it is done."""

    host: torch.Tensor  # pinned
    ids: npt.NDArray[np.int32]  # shares memory with host
    device: torch.Tensor
    done: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Opened:
    base: int  # address for CudaDriver.close
    blocks: int  # address of block 0


class CudaMemory:
    """See :class:`~trtx.torch_engine.handoff.memory.PoolMemory`.

    The pool must come from cudaMalloc or be a region (see CudaDriver.export). Copies run on their own streams, one
    after the other, concurrently with the engine's computation.
    """

    kind = "cuda"

    def __init__(self, pool: torch.Tensor, block_bytes: int) -> None:
        """Compiles the kernel and tries both ways to copy. Raises MemoryUnreachable if the pool can't be shared."""
        if block_bytes % (2 * WORD_BYTES):
            raise MemoryUnreachable(f"blocks of {block_bytes} bytes are not a multiple of {2 * WORD_BYTES}")
        self._device = pool.device
        self._driver = CudaDriver()
        if not self._driver.copies_batches:
            raise MemoryUnreachable("the driver is older than CUDA 12.8, which introduced batched copies")
        try:
            self.handle, self.offset = self._driver.export(pool.data_ptr(), pool.nbytes)
        except CudaError as error:
            raise MemoryUnreachable(str(error)) from error
        self.own = _Opened(0, pool.data_ptr())
        self._block_bytes = block_bytes
        self._batched_blocks = -(-BATCHED_BYTES // block_bytes)
        self._stream, *self._others = (torch.cuda.Stream(pool.device) for _ in range(COPY_STREAMS))
        self._free: list[_Ticket] = []
        self._launch = self._compile()[(PROGRAMS, 1, 1)]
        first = np.zeros(1, np.int32)  # copies block 0 onto itself
        ticket = self._gather(self.own, first, first)
        self._copy(self.own, first, first, CopySpans.whole(block_bytes))
        ticket.done.record(self._stream)
        self._stream.synchronize()
        assert self.is_done(ticket)

    def _compile(self) -> Any:
        from trtx.torch_engine.handoff.gather import gather_blocks_kernel

        return gather_blocks_kernel.warmup(
            torch.int64, torch.int64, torch.int32, 2, BLOCK_WORDS=self._block_bytes // WORD_BYTES, TILE=TILE,
            num_warps=WARPS, grid=(1,),
        )  # fmt: skip

    def adopt_thread(self) -> None:
        self._driver.adopt_thread()

    def open(self, offer: DirectOffer, pid: int) -> _Opened:
        try:
            return _Opened(base := self._driver.open(offer.handle, pid), base + offer.offset)
        except CudaError as error:
            raise MemoryUnreachable(str(error)) from error

    def shut(self, pool: _Opened) -> None:
        self._driver.close(pool.base)

    def start(self, pool: _Opened, remote: BlockIds, local: BlockIds, spans: CopySpans) -> _Ticket:
        is_whole = spans.length == self._block_bytes == spans.source_block
        if is_whole and len(remote) < self._batched_blocks:
            ticket = self._gather(pool, remote, local)
        else:
            ticket = self._take_ticket(0)
            self._copy(pool, remote, local, spans)
        ticket.done.record(self._stream)
        return ticket

    def _gather(self, pool: _Opened, remote: BlockIds, local: BlockIds) -> _Ticket:
        count = len(remote)
        ticket = self._take_ticket(2 * count)
        ticket.ids[:count] = remote
        ticket.ids[count : 2 * count] = local
        stream, ids = self._stream.cuda_stream, ticket.device.data_ptr()
        self._driver.copy_to_device(ids, ticket.host.data_ptr(), 8 * count, stream)
        self._launch(pool.blocks, self.own.blocks, ids, count, self._block_bytes // WORD_BYTES, TILE, stream=stream)
        return ticket

    def _copy(self, pool: _Opened, remote: BlockIds, local: BlockIds, spans: CopySpans) -> None:
        targets = local.astype(np.uint64) * np.uint64(self._block_bytes) + np.uint64(self.own.blocks + spans.target)
        sources = remote.astype(np.uint64) * np.uint64(spans.source_block) + np.uint64(pool.blocks + spans.source)
        sizes = np.full(-(-len(remote) // COPY_STREAMS), spans.length, np.uint64)
        for other in self._others:
            other.wait_stream(self._stream)
        streams = (self._stream, *self._others)
        for stream, begin in zip(streams, range(0, len(targets), len(sizes)), strict=False):  # few blocks: few streams
            share = slice(begin, begin + len(sizes))
            self._driver.copy_batch(targets[share], sources[share], sizes, stream.cuda_stream)
        for other in self._others:
            self._stream.wait_stream(other)

    def _take_ticket(self, size: int) -> _Ticket:
        if self._free and self._free[-1].ids.size >= size:
            return self._free.pop()
        room = max(_IDS, 1 << (size - 1).bit_length())
        host = torch.empty(room, dtype=torch.int32, pin_memory=True)
        device = torch.empty(room, dtype=torch.int32, device=self._device)
        # The allocation may be reused from a tensor that a step in flight still uses.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return _Ticket(host, host.numpy(), device, torch.cuda.Event())

    def is_done(self, copy: _Ticket) -> bool:
        if not copy.done.query():
            return False
        self._free.append(copy)
        return True

    def close(self) -> None:
        self._stream.synchronize()
        self._driver.close_exports()

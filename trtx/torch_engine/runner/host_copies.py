"""The host tier's memory, and the copies between it and the KV pool.

On a GPU the memory is pinned, so that copy engines read and write it without a kernel. Stores and loads have a stream
each, because PCIe carries both directions at once. On a CPU the "device" is memory too, and a copy is done when it
returns.
"""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtx.errors import UsageError
from trtx.memory.host import host_cache_shortage, host_cache_too_small, host_memory
from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.step import ModelRunner


def check_host_memory(num_bytes: int, ranks: int = 1) -> None:
    """Raises UsageError if this machine has too little free host memory for all ranks.

    Call it before the weights are loaded.
    """
    if (shortage := host_cache_shortage(num_bytes, host_memory(), ranks)) is not None:
        raise UsageError(shortage)


def pools_of(runner: ModelRunner) -> tuple[Tensor, ...]:
    """Returns contiguous tensors ``[num_blocks, ...]``: the KV of each block, and what a draft model keeps for it."""
    model = runner.draft_model
    return (runner.pool,) if model is None else (runner.pool, *model.pools)


def create_host_copies(pools: Sequence[Tensor], num_bytes: int, num_groups: int) -> BlockCopies:
    """Allocates host memory for as many blocks as ``num_bytes`` holds. Pinning takes 1 s for 4 GiB.

    ``pools``: see :func:`pools_of`. ``num_groups``: KV cache groups of the model. Raises UsageError if ``num_bytes``
    holds less than a block of each group, or is more than the driver pins.
    """
    parts = [pool.view(pool.shape[0], -1).view(torch.uint8) for pool in pools]
    block_bytes = sum(part.shape[1] for part in parts)
    if (problem := host_cache_too_small(num_bytes, block_bytes, num_groups)) is not None:
        raise UsageError(problem)
    num_blocks = num_bytes // block_bytes
    if parts[0].device.type == "cuda":
        return CudaBlockCopies(parts, num_blocks)
    return CpuBlockCopies(parts, num_blocks)


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Joins pairs of blocks that follow each other on both sides: (first source, first target, count)."""
    pairs = sorted(zip(sources, targets, strict=True))
    begin = 0
    for end in range(1, len(pairs) + 1):
        step = end - begin
        first = pairs[begin]
        if end == len(pairs) or pairs[end] != (first[0] + step, first[1] + step):
            yield first[0], first[1], step
            begin = end


@dataclass(frozen=True, slots=True)
class DoneCopy:
    seconds: float

    def is_done(self) -> bool:
        return True


class CpuBlockCopies:
    """Copies between two pools in host memory."""

    def __init__(self, parts: Sequence[Tensor], num_blocks: int) -> None:
        """``parts``: the device's pools as bytes, ``[num_blocks, bytes of a block's part]`` each."""
        self.num_blocks = num_blocks
        self.block_bytes = self.bytes_of_all_ranks = sum(part.shape[1] for part in parts)
        self._device = parts
        self._host = [torch.empty(num_blocks, part.shape[1], dtype=torch.uint8) for part in parts]

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> DoneCopy:
        began = time.perf_counter()
        for source, target, count in runs(device_ids, host_ids):
            for host, device in zip(self._host, self._device, strict=True):
                host[target : target + count] = device[source : source + count]
        return DoneCopy(time.perf_counter() - began)

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> DoneCopy:
        began = time.perf_counter()
        for source, target, count in runs(host_ids, device_ids):
            for host, device in zip(self._host, self._device, strict=True):
                device[target : target + count] = host[source : source + count]
        return DoneCopy(time.perf_counter() - began)

    def hold_steps(self) -> None: ...

    def wait_for_stores(self) -> None: ...

    def close(self) -> None:
        del self._host


@dataclass(slots=True)
class CudaCopy:
    """Copies that were launched together on a stream: two CUDA events show when they began and ended."""

    began: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    ended: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))

    def is_done(self) -> bool:
        return bool(self.ended.query())

    @property
    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.ended)) / 1e3


class CudaBlockCopies:
    """Copies between the KV pool on a GPU and pinned host memory. The GPU never waits for the host."""

    def __init__(self, parts: Sequence[Tensor], num_blocks: int) -> None:
        """``parts``: the device's pools as bytes, ``[num_blocks, bytes of a block's part]`` each."""
        self.num_blocks = num_blocks
        self.block_bytes = self.bytes_of_all_ranks = sum(part.shape[1] for part in parts)
        self._parts = parts
        self._memory = PinnedMemory(num_blocks * self.block_bytes)
        widths = [part.shape[1] for part in parts]
        memory = self._memory.tensor.split([num_blocks * width for width in widths])
        self._host = [one.view(num_blocks, width) for one, width in zip(memory, widths, strict=True)]
        self._device = parts[0].device
        self._stores = torch.cuda.Stream(self._device)
        self._loads = torch.cuda.Stream(self._device)

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> CudaCopy:
        # The blocks were written by steps whose results the host has, so their contents are there.
        return self._copy(self._stores, self._parts, device_ids, self._host, host_ids)

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> CudaCopy:
        if after_stores:
            self._loads.wait_stream(self._stores)
        return self._copy(self._loads, self._host, host_ids, self._parts, device_ids)

    @staticmethod
    def _copy(
        stream: torch.cuda.Stream, sources: Sequence[Tensor], source_ids: Sequence[int], targets: Sequence[Tensor],
        target_ids: Sequence[int],
    ) -> CudaCopy:  # fmt: skip
        copy = CudaCopy()
        with torch.cuda.stream(stream):
            copy.began.record(stream)
            for first, second, count in runs(source_ids, target_ids):
                for source, target in zip(sources, targets, strict=True):
                    target[second : second + count].copy_(source[first : first + count], non_blocking=True)
            copy.ended.record(stream)
        return copy

    def hold_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stores)

    def wait_for_stores(self) -> None:
        self._stores.synchronize()

    def close(self) -> None:
        self._stores.synchronize()
        self._loads.synchronize()
        del self._host
        self._memory.close()


class PinnedMemory:
    """Pinned host memory of exactly the size asked for; torch's own allocator rounds up to a power of two.

    The kernel frees it with the process, however that ends.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0)
        if int(code) != 0:
            raise UsageError(
                f"kv_cache_config.host_cache_size: the CUDA driver can't pin {num_bytes >> 20} MiB of host memory "
                f"({torch.cuda.CudaError(int(code))}); lower it, or raise the container's memory limit"
            )

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor
        self._map.close()

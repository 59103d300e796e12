"""One-shot all-reduce of small tensors in one kernel, over torch's symmetric memory."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

logger = logging.getLogger(__name__)

_MOST_BYTES, _MOST_BYTES_OF_TWO = 1 << 19, 1 << 22
_DTYPES = (torch.bfloat16, torch.float32)  # what the kernel adds
_ALIGNMENT = 16  # bytes that a thread reads at once


def most_bytes(size: int) -> int:
    """Bytes of the largest tensor that ``size`` ranks add in one kernel. In this kernel, each rank reads the whole
    tensor of every other rank.
    """
    return _MOST_BYTES_OF_TWO if size == 2 else _MOST_BYTES


class PeerSums:
    """Adds small tensors in one kernel: each rank copies its tensor to a shared buffer, waits for the others, and reads
    all tensors.

    It uses no NVLink multicast, which many hosts forbid. Create it once in a process: torch (2.11 and 2.13) keeps the
    store of the first group by the group's name, which is "0" for every group here, so that the ranks of a second group
    would wait for each other in different stores forever.
    """

    was_created = False

    def __init__(self, device: torch.device, size: int) -> None:
        PeerSums.was_created = True
        self._most_bytes = most_bytes(size)
        self._buffer = symmetric_memory.empty(self._most_bytes, dtype=torch.uint8, device=device)
        world = dist.group.WORLD
        assert world is not None
        self._group_name = world.group_name
        symmetric_memory.rendezvous(self._buffer, self._group_name)

    def takes(self, partial: Tensor) -> bool:
        size = partial.numel() * partial.element_size()
        return (
            size <= self._most_bytes
            and not size % _ALIGNMENT
            and not partial.data_ptr() % _ALIGNMENT
            and partial.dtype in _DTYPES
            and partial.is_contiguous()
        )

    def __call__(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors that :meth:`takes` accepts, added in the order of ranks."""
        shared = self._buffer[: partial.numel() * partial.element_size()].view(partial.dtype)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, partial.view(-1), "sum", self._group_name)
        return summed.view(partial.shape)


def can_read_peers(rank: int, size: int) -> bool:
    """Whether this rank's GPU can read the memory of all others."""
    others = [other for other in range(size) if other != rank]
    blind = [other for other in others if not torch.cuda.can_device_access_peer(rank, other)]
    if blind:
        logger.warning(
            "GPU %d of this engine can't read the memory of GPU %d: sums go through the host and take longer; give "
            "the worker GPUs with NVLink or peer access (--gpus)",
            rank,
            blind[0],
        )
    return not blind

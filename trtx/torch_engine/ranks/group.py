"""The ranks' collectives: NCCL between GPUs, gloo between processes on a CPU. Both on this machine's loopback."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trtx.torch_engine.ranks.all_reduce import PeerSums, can_read_peers

_NEVER = timedelta(days=365)  # a step may wait for a request's own logits processor; dead ranks are noticed otherwise
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Many hosts forbid NVLink multicast.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # dead ranks are noticed by their sockets
}
# torch 2.13 renamed it, and warns of the old name.
_all_gather: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class DistributedGroup:
    """A :class:`trtx.torch_engine.runner.rank_split.RankGroup` on torch's default process group."""

    def __init__(self, rank: int, size: int, device: torch.device, *, ordered: bool) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        # A library may add the ranks' terms in an order that depends on the element's place in the tensor. With two
        # terms, every order gives the same bits.
        self._adds_in_order = ordered and size > 2
        self._peer_sums: PeerSums | None = None

    @classmethod
    def join_at(
        cls, meeting: Path, rank: int, size: int, device: torch.device, *, ordered: bool, reads_peers: bool = True
    ) -> DistributedGroup:
        """Joins the group whose ranks meet in the file ``meeting``; returns once all have joined.

        ``ordered``: sums are added in the order of ranks, so that the bits of a sum depend on its terms alone.
        ``reads_peers``: small sums may go through memory that the GPUs share, if they can.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=_NEVER,
            device_id=device if is_gpu else None,
        )  # fmt: skip
        group = cls(rank, size, device, ordered=ordered)
        # The first collective allocates the library's buffers, before the KV pool takes the rest of the memory.
        is_wanted = reads_peers and is_gpu and not group._adds_in_order and not PeerSums.was_created
        if group.smallest(int(is_wanted and can_read_peers(rank, size))):
            group._peer_sums = PeerSums(device, size)
        return group

    def add(self, partial: Tensor) -> Tensor:
        if self._peer_sums is not None and self._peer_sums.takes(partial):
            return self._peer_sums(partial)
        if not self._adds_in_order:
            dist.all_reduce(partial)
            return partial
        parts = self._gathered(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        return partial.copy_(total)

    def join(self, part: Tensor) -> Tensor:
        return self._gathered(part).transpose(0, 1).flatten(1)

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks: ``[size, *part.shape]``."""
        parts = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        _all_gather(parts, part.contiguous())
        return parts.view(self.size, *part.shape)

    def share(self, value: Tensor) -> None:
        dist.broadcast(value, 0)

    def smallest(self, number: int) -> int:
        value = torch.tensor([number], device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def close(self) -> None:
        """Leaves the group. The other ranks may be gone already."""
        if self._device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # to destroy it would wait for the other ranks
        else:
            dist.destroy_process_group()

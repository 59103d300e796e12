"""A bounded region of CPU memory registered with NIXL, divided into blocks of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtx.ipc.shared_tensor import SharedTensor, open_shared
from trtx.torch_engine.embeddings.handle import NixlEmbeddingOffer

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.handoff.nixl_agent import PoolAgent

BLOCK_BYTES = 1 << 16


class Blocks:
    """Tracks free blocks. Every block is free or belongs to one owner."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Returns ``count`` blocks, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        self._taken.update(taken)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._taken.remove(block)
            self._free.append(block)


class Arena:
    """An arena for embeddings that NIXL transfers, for one thread at a time.

    Construction imports NIXL, which takes seconds.
    """

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.blocks = Blocks(max(1, num_bytes // BLOCK_BYTES))
        # Not zeroed: pages take no memory until an embedding first uses them.
        self._pool: torch.Tensor = torch.empty(self.blocks.count, BLOCK_BYTES, dtype=torch.uint8)
        self.agent = self._new_agent()

    def _new_agent(self) -> PoolAgent:
        from trtx.torch_engine.handoff.nixl_agent import PoolAgent

        return PoolAgent(self._pool, BLOCK_BYTES)

    def start_anew(self) -> None:
        """Replaces the agent. Afterwards no transfer in flight writes into the arena, and old offers are void."""
        self.agent.close()
        self.agent = self._new_agent()

    def write(self, blocks: Sequence[int], shared: SharedTensor) -> None:
        """Copies a tensor into ``blocks``. Raises SharedTensorError."""
        import torch

        data = open_shared(shared).flatten().view(torch.uint8)
        for at, block in enumerate(blocks):
            piece = data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
            self._pool[block, : len(piece)] = piece

    def rows(self, blocks: Sequence[int], dtype: str, size: tuple[int, int], nbytes: int) -> torch.Tensor:
        """Returns a copy of the tensor in ``blocks``."""
        import torch

        data = self._pool[list(blocks)].flatten()[:nbytes]
        return data.view(getattr(torch, dtype)).view(size)

    def offer(self, blocks: tuple[int, ...], lease_id: int) -> NixlEmbeddingOffer:
        return NixlEmbeddingOffer(
            agent_name=self.agent.name,
            agent_metadata=self.agent.metadata,
            base_address=self._pool.data_ptr(),
            num_blocks=self.blocks.count,
            block_bytes=BLOCK_BYTES,
            block_ids=blocks,
            lease_id=lease_id,
        )

    def connect(self, offer: NixlEmbeddingOffer) -> Any:
        """Connects to the offering agent. Raises AgentError."""
        return self.agent.connect(
            offer.agent_name, offer.agent_metadata, "DRAM", offer.base_address, offer.num_blocks, 0
        )

    def read(self, peer: Any, offer: NixlEmbeddingOffer, blocks: Sequence[int], message: bytes) -> Any:
        """Starts to read the offered blocks into ``blocks``. Raises AgentError."""
        import numpy as np  # imported late: only NIXL needs it, and each text worker imports this module

        remote, local = (np.array(ids, dtype=np.int32) for ids in (offer.block_ids, blocks))
        return self.agent.read(peer, remote, local, message)

    def close(self) -> None:
        self.agent.close()

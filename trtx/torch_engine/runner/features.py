"""The hidden states that an EAGLE-3 head reads: projected when the target model computes them, stored by position."""

from __future__ import annotations

import torch
from torch import Tensor

from trtx.torch_engine.runner.kernels import KvCache, PassInputs
from trtx.torch_engine.runner.linear import Multiplier

EMBEDDINGS = -1
"""The layer before the first one: its output is the embeddings."""


class FeatureStore:
    """``rows`` [num_blocks * tokens_per_block + 1, hidden]: one row for each token position of the first KV cache
    group's blocks.

    So features stay valid wherever the KV does: over a prefix hit, a preemption and steps without drafts. The last row
    receives those of padding tokens. Every method except the constructor works inside a CUDA graph.
    """

    def __init__(
        self, layers: tuple[int, ...], projection: Tensor, cache: KvCache, rows: Tensor, multiplier: Multiplier
    ) -> None:
        """``layers``: whose outputs are projected. ``projection`` [hidden, len(layers) * hidden]. ``rows``: zeros."""
        self.layers = frozenset(layers)
        self._last = layers[-1]
        self._projection = projection
        self._multiplier = multiplier
        self._cache = cache
        self._padding_row = rows.shape[0] - 1
        self.rows = rows
        self._captured: list[Tensor] = []

    @property
    def blocks(self) -> Tensor:
        """The features of each block, ``[num_blocks, tokens_per_block, hidden]``."""
        return self.rows[:-1].view(-1, self._cache.tokens_per_block, self.rows.shape[1])

    def capture(self, layer: int, residual: Tensor, inputs: PassInputs) -> None:
        """Takes the output of a layer. With that of the last one, stores the features of all tokens of a forward."""
        self._captured.append(residual)
        if layer == self._last:
            captured, self._captured = self._captured, []
            projected = self._multiplier(torch.cat(captured, dim=-1), self._projection)
            self.rows.index_copy_(0, self._places(inputs.positions, inputs.slots), projected)

    def read(self, inputs: PassInputs) -> Tensor:
        """Returns the features [tokens, hidden] of the positions of a forward."""
        return self.rows.index_select(0, self._places(inputs.positions, inputs.slots))

    def _places(self, positions: Tensor, slots: Tensor) -> Tensor:
        cache, size = self._cache, self._cache.tokens_per_block
        blocks = cache.block_table[slots.long(), (positions // size).long()].long()
        return (blocks * size + positions % size).masked_fill(slots == cache.padding_slot, self._padding_row)

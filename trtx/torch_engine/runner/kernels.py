"""What the decoder asks of a device: the operations around its matrix products, and the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.runner.weights import LayerWeights


class Attention(Enum):
    """How attention's work is cut up on a GPU."""

    BY_ROWS = "by rows"  # decodes in as many parts as their number wants, prompts in none
    BY_LENGTH = "by length"  # every sequence in as many parts as its share of the pass's KV wants
    # In chunks of KV that begin and end at the same positions whatever else is in a pass, and are folded in order: no
    # bit of a row's result depends on the rows beside it, nor on how its sequence was cut into passes. On a CPU too.
    FIXED = "fixed"


DEFAULT_ATTENTION = Attention.BY_LENGTH
"""Of a runner: docs/performance-notes.md."""

FIXED_CHUNK = 512
"""KV tokens of a chunk of :attr:`Attention.FIXED`; another number is other bits."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """What of some sequences' attention is one program's work; one for all layers of a pass.

    See :mod:`trtx.torch_engine.runner.triton_ragged_attention`.
    """

    num_items: Tensor  # [1] int32
    items: Tensor  # [most items, 8] int32
    arrived: Tensor  # [most items, num_kv_heads] int32
    part_sums: Tensor  # [rows of parts, num_heads, head_dim] float32
    part_weights: Tensor  # [rows of parts, num_heads, 2] float32
    tile_rows: int
    block_rows: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequences of a pass that computes several tokens of each: ``[starts[i], starts[i + 1])`` are sequence i's.

    In a merged pass they come behind its decodes: ``starts[0]`` is the number of those.
    """

    slots: Tensor  # [num_sequences] int32: rows of the block table
    starts: Tensor  # [num_sequences + 1] int32
    contexts: Tensor  # [num_sequences] int32: tokens of the sequence before this pass, their KV is in the pool
    max_length: int  # most new tokens of one sequence
    max_context: int | None = None  # most of ``contexts``, or more; None: the host does not know


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The tokens of one forward pass.

    ``spans`` None: a decode pass, every token is its sequence's only one. There a slot may be the padding slot,
    the block table's last row: its token writes no KV and its result means nothing. With spans, the first
    ``num_decodes`` tokens are the only ones of sequences that no span has.
    """

    token_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int32
    slots: Tensor  # [num_tokens] int32: row of the block table that each token's sequence has
    spans: Spans | None = None
    num_decodes: int = 0
    # In place of ``num_decodes`` where a pass has room for more decodes than there are: spans of one token, or none.
    decodes: Spans | None = None
    # Of adjacent tokens from the first number on: rows [n, hidden] that the pass takes in place of their embeddings,
    # with those that the first layers add behind them where the model has any: [n, hidden * (1 + levels)].
    media: tuple[tuple[int, Tensor], ...] = ()
    # [num_tokens, head_dim] float32, cosines and sines, of a model with several positions a token; else ``positions``
    # say which rows of the kernels' own table.
    rotary: Tensor | None = None
    # [rows] int32: the tokens whose hidden states are asked for, those of each span's last one as a rule; None: all.
    wanted: Tensor | None = None
    work: tuple[WorkList, ...] = ()  # what ``Kernels.planned`` adds: of the decodes, of the spans


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV pool and who has which block of it. A float8 pool holds values divided by their layer's scale.

    Kernels know the pool by its strides alone: in what order its dimensions lie in memory is ``KvGeometry``'s matter.
    A head of a token is ``head_dim`` adjacent elements.
    """

    pool: Tensor  # [num_blocks, block_layers, 2, tokens_per_block, num_kv_heads, head_dim]: a view; see ``of``
    block_table: Tensor  # [max_batch_size + 1, max_blocks] int32, of the first group; the last row is the padding slot
    scales: Tensor | None = None  # [num_layers, 2] float32, of k and v; None unless the pool is float8_e4m3fn
    # Of several layer groups: [num_groups, max_batch_size + 1, max_blocks] int32, the first is ``block_table``; and of
    # each layer its group, and its index in a block of that.
    group_tables: Tensor | None = None
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pool: Tensor, block_table: Tensor, scales: Tensor | None = None) -> KvCache:
        """Of one layer group. ``pool``: as it lies in memory, ``[num_blocks, *KvGeometry.block_shape]``."""
        return cls(pool.permute(0, 2, 3, 4, 1, 5), block_table, scales)

    @classmethod
    def of_groups(cls, pool: Tensor, tables: Tensor, geometry: KvGeometry, scales: Tensor | None = None) -> KvCache:
        """``tables``: of each group one."""
        return cls(pool.permute(0, 2, 3, 4, 1, 5), tables[0], scales, tables, geometry.places)

    @property
    def tables(self) -> Tensor:
        """``[num_groups, max_batch_size + 1, max_blocks]`` int32"""
        return self.block_table.unsqueeze(0) if self.group_tables is None else self.group_tables

    def place(self, layer: int) -> tuple[Tensor, int]:
        """(the block table of a layer's group, the layer's index in a block)"""
        if self.group_tables is None:
            return self.block_table, layer
        group, index = self.places[layer]
        return self.group_tables[group], index

    @property
    def tokens_per_block(self) -> int:
        return self.pool.shape[3]

    @property
    def padding_slot(self) -> int:
        return self.block_table.shape[0] - 1


class Kernels(Protocol):
    """One device's operations. Every one returns new tensors; only ``rope_and_write`` changes the pool.

    ``scale`` is the ``input_scale`` of the :class:`trtx.torch_engine.runner.linear.Linear` that takes the result: with
    it the result is float8_e4m3fn, divided by it and saturated; None leaves it in x's dtype.
    """

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        """``inputs`` with what ``attend`` wants to know of the pass in every layer; ``dtype`` is q's there.

        To be called once a pass, before its first ``attend``. Waits for nothing.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """``[n, hidden]`` normalised in float32, scaled in x's dtype."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum) of ``x + residual``, both ``[n, hidden]``."""

    def rope_and_write(self, qkv: Tensor, layer: int, weights: LayerWeights, inputs: PassInputs) -> Tensor:
        """Head norms where the model has them, rotation, K and V into the pool; returns q ``[n, heads, head_dim]``."""

    def attend(self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None) -> Tensor:
        """Causal attention over the pool, ``[n, heads * head_dim]``; the pass's own KV is already written."""

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: ``[n, 2 * intermediate]`` to ``[n, intermediate]``."""


def int32(values: list[int], device: torch.device) -> Tensor:
    """A small host list on ``device``; on CUDA through pinned memory, without waiting for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)

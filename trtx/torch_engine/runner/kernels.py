"""The device interface of the decoder: the operations between its matmuls, and the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.runner.weights import LayerWeights


class Attention(Enum):
    """How attention is split into work items on a GPU."""

    BY_LENGTH = "by length"  # split-KV for every sequence, by its share of the forward's KV
    # Fixed-split: chunks of KV begin and end at the same positions whatever else is in a forward, and are folded in
    # order. So a row's bits depend neither on other rows nor on how its sequence was split into forwards. On a CPU too.
    FIXED = "fixed"


FIXED_CHUNK = 512
"""KV tokens in a chunk of :attr:`Attention.FIXED`. Changing it changes the bits."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """Work items of attention for some sequences; one list serves all layers of a forward that have the same window.

    See :mod:`trtx.torch_engine.runner.triton_work_lists`.
    """

    num_items: Tensor  # [1] int32
    items: Tensor  # [most items, 8] int32
    arrived: Tensor  # [most items, num_kv_heads] int32
    part_sums: Tensor  # [rows of parts, num_heads, head_dim] float32
    part_weights: Tensor  # [rows of parts, num_heads, 2] float32
    tile_rows: int
    block_rows: int
    window: int | None  # positions that a query attends to, including its own; None: all


@dataclass(frozen=True, slots=True)
class Spans:
    """Variable-length sequences of a forward: tokens ``[starts[i], starts[i + 1])`` belong to sequence i.

    In a mixed batch they follow the decodes: ``starts[0]`` is the number of decodes.
    """

    slots: Tensor  # [num_sequences] int32: rows of the block table
    starts: Tensor  # [num_sequences + 1] int32
    contexts: Tensor  # tokens before this forward, whose KV is in the pool
    max_length: int  # upper bound of one sequence's new tokens
    max_context: int | None = None  # upper bound of ``contexts``; None: unknown to the host


@dataclass(frozen=True, slots=True)
class LongChunks:
    """A forward's prompt chunks for :mod:`trtx.torch_engine.runner.cudnn_attention`. Unused places have no tokens."""

    batch: int
    offsets: Tensor  # [batch + 1] int64: a chunk's first element in q, and the end of the last one
    new_lengths: Tensor  # [batch] int32: tokens of this forward
    lengths: Tensor  # [batch] int32: with those before them
    table: Tensor  # [batch, max_blocks] int32


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Input of one forward.

    ``spans`` None: a decode forward, with one token for each sequence. A slot may then be the padding slot, the block
    table's last row: its token writes no KV, and its result is undefined. With spans, the first ``num_decodes`` tokens
    are decodes, one for each sequence that has no span.
    """

    token_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int32
    slots: Tensor  # row of the block table, for each token
    spans: Spans | None = None
    num_decodes: int = 0
    # Replaces ``num_decodes`` in a CUDA graph bucket with room for more decodes: spans of one token, or empty ones.
    decodes: Spans | None = None
    # (offset, rows): rows [n, hidden] replace the token embeddings from ``offset`` on. Models whose first layers add
    # extra media vectors have them in the same rows: [n, hidden * (1 + levels)].
    media: tuple[tuple[int, Tensor], ...] = ()
    # [num_tokens, head_dim] float32 cosines and sines, for models with several positions for each token. None:
    # ``positions`` index the kernels' own table.
    rotary: Tensor | None = None
    # [rows] int32: tokens whose hidden states are requested, usually the last one of each sequence; None: all.
    wanted: Tensor | None = None
    work: tuple[WorkList, ...] = ()  # added by ``Kernels.planned``: for decodes, for spans; of each window
    long_chunks: LongChunks | None = None  # added by ``Kernels.planned``, in place of the work lists of spans

    @property
    def of_decodes(self) -> PassInputs:
        """The first ``num_decodes`` tokens as a decode forward."""
        count = self.num_decodes
        return PassInputs(self.token_ids[:count], self.positions[:count], self.slots[:count])


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV pool and its block tables. A float8 pool holds values divided by their layer's scale.

    Kernels address the pool by its strides; ``KvGeometry`` defines the memory layout. A head of a token is ``head_dim``
    adjacent elements.
    """

    pool: Tensor  # [num_blocks, block_layers, 2, tokens_per_block, num_kv_heads, head_dim]: a view; see ``of``
    block_table: Tensor  # of the first group, int32
    scales: Tensor | None = None  # [num_layers, 2] float32, for k and v; None unless the pool is float8_e4m3fn
    # For several KV cache groups: their block tables, [num_groups, max_batch_size + 1, max_blocks] int32, of which
    # ``block_table`` is the first; and for each layer its group and its index within a block.
    group_tables: Tensor | None = None
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pool: Tensor, block_table: Tensor, scales: Tensor | None = None) -> KvCache:
        """A cache with one KV cache group. ``pool`` in its memory layout: ``[num_blocks, *KvGeometry.block_shape]``."""
        return cls(pool.permute(0, 2, 3, 4, 1, 5), block_table, scales)

    @classmethod
    def of_groups(cls, pool: Tensor, tables: Tensor, geometry: KvGeometry, scales: Tensor | None = None) -> KvCache:
        """A cache with one block table of ``tables`` for each KV cache group of ``geometry``."""
        return cls(pool.permute(0, 2, 3, 4, 1, 5), tables[0], scales, tables, geometry.places)

    @property
    def tables(self) -> Tensor:
        """Block tables of all groups: ``[num_groups, max_batch_size + 1, max_blocks]`` int32."""
        return self.block_table.unsqueeze(0) if self.group_tables is None else self.group_tables

    def place(self, layer: int) -> tuple[Tensor, int]:
        """Returns (block table of the layer's group, the layer's index within a block)."""
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
    """Operations on one device. All return new tensors; only ``rope_and_write`` changes the pool.

    ``scale`` is the ``input_scale`` of the :class:`trtx.torch_engine.runner.linear.Linear` that consumes the result. If
    given, the result is divided by it and saturated to float8_e4m3fn; None keeps x's dtype.
    """

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        """Returns ``inputs`` with the work lists that ``attend`` uses in every layer; ``dtype`` is q's.

        Call it once for each forward, before the first ``attend``. Does not wait for the device.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """RMSNorm of ``[n, hidden]``: normalised in float32, rounded to the weight's dtype, and multiplied by it."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (normalised sum, sum) of ``x + residual``, both ``[n, hidden]``."""

    def rope_and_write(self, qkv: Tensor, layer: int, weights: LayerWeights, inputs: PassInputs) -> Tensor:
        """Applies head norms, if the model has them, and RoPE; writes K and V into the pool.

        Returns q ``[n, heads, head_dim]``.
        """

    def attend(
        self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention over the pool, ``[n, heads * head_dim]``. The forward's own KV must already be written.

        ``sinks`` [heads]: logits that each row's softmax has in addition, without values.
        """

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: ``[n, 2 * intermediate]`` to ``[n, intermediate]``."""

    def gelu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """As ``silu_and_mul`` with the tanh approximation of GELU."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """The sigmoid of each element of a float32 tensor."""


def int32(values: list[int], device: torch.device) -> Tensor:
    """Copies a small host list to ``device``; on CUDA through pinned memory, without waiting for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)

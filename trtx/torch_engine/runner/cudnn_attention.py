"""Attention of long prompt chunks by cuDNN, over the paged KV pool.

cuDNN's kernels for Hopper are faster than :mod:`triton_ragged_attention` where a chunk has many tokens
(docs/performance-notes.md). They do not divide the KV of a chunk among programs, so decodes and short chunks stay with
the Triton kernels. Lengths and block tables are read on the device, so one plan serves all smaller forwards.

It needs the Python package nvidia-cudnn-frontend; cuDNN itself comes with torch for CUDA.
"""

# The package has no type stubs, and torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.kernels import KvCache, LongChunks, PassInputs

LEAST_TOKENS = 1024
"""New tokens of a forward's prompt chunks, from which cuDNN is used."""
_LEAST_MEAN = 512  # new tokens of a chunk; below, most of cuDNN's tiles would be empty
_BATCHES = (1, 8)  # chunks of a plan
_LEAST_CAPABILITY = (9, 0)
_LEAST_BACKEND = 90900  # cuDNN 9.9; tried with 9.19
_DTYPES = (torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """cuDNN's execution plan for up to ``batch`` chunks."""

    graph: Any
    q: Any
    k: Any
    v: Any
    out: Any
    table: Any
    v_table: Any
    new_lengths: Any
    lengths: Any
    offsets: Any
    workspace: Tensor


class CudnnAttention:
    """Causal attention of one forward's prompt chunks, over a pool with one KV cache group."""

    def __init__(self, config: ModelConfig, cache: KvCache, max_num_tokens: int) -> None:
        """``max_num_tokens``: of a forward. Builds the plans, which takes a second or two.

        Raises RuntimeError, cuDNN's own, if cuDNN does not support the shape.
        """
        import cudnn

        self._cudnn = cudnn
        self._config = config
        places = [cache.place(layer) for layer in range(config.num_layers)]
        self._table = places[0][0]
        self._layers = [cache.pool[:, index].permute(1, 0, 3, 2, 4) for _, index in places]
        self._most = max_num_tokens
        self._handle = cudnn.create_handle()
        self._plans = {batch: self._build(batch, cache.tokens_per_block) for batch in _BATCHES}

    @classmethod
    def of(cls, config: ModelConfig, cache: KvCache, max_num_tokens: int) -> CudnnAttention | None:
        """None where the Triton kernels compute all attention.

        That is: without the package, on GPUs before Hopper, and for float32, a float8 pool, windows, or heads that
        cuDNN does not support.
        """
        pool = cache.pool
        if importlib.util.find_spec("cudnn") is None or max_num_tokens < LEAST_TOKENS:
            return None
        if pool.dtype not in _DTYPES or any(config.windows or ()) or config.head_dim % 8 or config.head_dim > 128:
            return None
        if torch.cuda.get_device_capability(pool.device) < _LEAST_CAPABILITY:
            return None
        try:
            import cudnn

            if cudnn.backend_version() < _LEAST_BACKEND:
                return None
            return cls(config, cache, max_num_tokens)
        except (ImportError, RuntimeError, ValueError) as error:
            _log.warning("Long prompts use Triton kernels, because cuDNN's attention does not work here: %s", error)
            return None

    def _build(self, batch: int, tokens_per_block: int) -> _Plan:
        cudnn, config, pool = self._cudnn, self._config, self._layers[0]
        kind = cudnn.data_type.BFLOAT16 if pool.dtype == torch.bfloat16 else cudnn.data_type.HALF
        int32, int64, real = cudnn.data_type.INT32, cudnn.data_type.INT64, cudnn.data_type.FLOAT
        heads, dim, most, width = config.num_heads, config.head_dim, self._most, self._table.shape[1]
        graph = cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=real, compute_data_type=real, handle=self._handle
        )
        rows = {"dim": [batch, heads, most, dim], "stride": [most * heads * dim, dim, heads * dim, 1]}

        def column(name: str, count: int, data_type: Any) -> Any:
            return graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type)

        def table(name: str) -> Any:
            return graph.tensor(name=name, dim=[batch, 1, width, 1], stride=[width, width, 1, 1], data_type=int32)

        offsets = column("offsets", batch + 1, int64)
        q = graph.tensor(name="q", data_type=kind, **rows)
        q.set_ragged_offset(offsets)
        k, v = (
            graph.tensor(name=name, dim=list(pool[side].shape), stride=list(pool[side].stride()), data_type=kind)
            for side, name in enumerate("kv")
        )
        k_table, v_table = table("k_table"), table("v_table")
        new_lengths, lengths = column("new_lengths", batch, int32), column("lengths", batch, int32)
        out, _ = graph.sdpa(
            name="attention", q=q, k=k, v=v, generate_stats=False, attn_scale=dim**-0.5, use_padding_mask=True,
            seq_len_q=new_lengths, seq_len_kv=lengths, paged_attention_k_table=k_table,
            paged_attention_v_table=v_table, paged_attention_max_seq_len_kv=width * tokens_per_block,
            use_causal_mask_bottom_right=True,
        )  # fmt: skip
        out.set_output(True).set_dim(rows["dim"]).set_stride(rows["stride"]).set_data_type(kind)
        out.set_ragged_offset(offsets)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=pool.device)
        return _Plan(graph, q, k, v, out, k_table, v_table, new_lengths, lengths, offsets, workspace)

    def prepared(self, inputs: PassInputs, dtype: torch.dtype) -> LongChunks | None:
        """Returns the inputs for a forward's chunks, or None if the Triton kernels are to compute them.

        They are for a CUDA graph, whose chunks may be short, and for few new tokens. ``dtype``: q's. Launches a few
        small kernels and does not wait for the device.
        """
        spans = inputs.spans
        if spans is None or spans.max_context is None or dtype != self._layers[0].dtype:
            return None
        count, tokens = spans.slots.shape[0], inputs.slots.shape[0] - inputs.num_decodes
        if tokens < LEAST_TOKENS or tokens < _LEAST_MEAN * count or spans.max_length > self._most:
            return None
        batch = next((batch for batch in _BATCHES if batch >= count), None)
        if batch is None:
            return None
        padding = batch - count
        starts = torch.cat((spans.starts, spans.starts[-1:].expand(padding)))
        new = starts.diff()
        contexts = torch.cat((spans.contexts, spans.contexts.new_zeros(padding)))
        table = torch.zeros(batch, self._table.shape[1], dtype=torch.int32, device=self._table.device)
        table[:count] = self._table.index_select(0, spans.slots)
        row = self._config.num_heads * self._config.head_dim
        return LongChunks(batch, starts.to(torch.int64) * row, new, contexts + new, table)

    def attend(self, q: Tensor, layer: int, chunks: LongChunks, out: Tensor) -> None:
        """Computes the chunks' rows of ``out`` from ``q``, both [tokens, heads, dim], contiguous, in the pool's dtype.

        The forward's own KV must already be written. Rows outside all chunks stay as they are.
        """
        plan = self._plans[chunks.batch]
        k, v = self._layers[layer]
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        plan.graph.execute(
            {
                plan.q: q, plan.k: k, plan.v: v, plan.out: out, plan.table: chunks.table, plan.v_table: chunks.table,
                plan.new_lengths: chunks.new_lengths, plan.lengths: chunks.lengths, plan.offsets: chunks.offsets,
            },
            plan.workspace, handle=self._handle,
        )  # fmt: skip

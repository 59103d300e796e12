"""The part of an engine config that decides how much memory a worker takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Each engine's own defaults: TensorRT-LLM's llm_args.json (2048 since 1.3.0rc7; CUDA graphs to 128), and
# trtx.torch_engine.llm_args, trtx.torch_engine.runner.graphs.
_MAX_BATCH_SIZE = {"tensorrt-llm": 2048, "torch": 256}
_MAX_NUM_TOKENS = 8192
_GRAPH_BATCH = 128
FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """TensorRT-LLM's field names, short. ``max_seq_len`` None: the model's. ``windows``: repeated over the layers."""

    engine: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    moe_ep: int = 1
    attention_dp: bool = False
    lm_head_tp: bool = False
    expert_slots: int = 0
    max_batch_size: int = 256
    max_num_tokens: int = _MAX_NUM_TOKENS
    max_seq_len: int | None = None
    tokens_per_block: int = 32
    fraction: float = FRACTION
    max_tokens: int | None = None
    max_gpu_total_bytes: int = 0
    kv_dtype: str = "auto"
    dtype: str = "auto"
    windows: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()
    transfers: bool = False
    transfer_tokens: int | None = None
    speculation: str | None = None
    draft_tokens: int = 0
    draft_model: str | None = None

    @property
    def world(self) -> int:
        """GPUs a worker."""
        return self.tp * self.pp * self.cp


def limits_of(values: Mapping[str, Any], *, engine: str) -> Limits:
    """Reads resolved values of one role, as ``trtx.config.resolve_engine_config`` returns them."""
    kv = values.get("kv_cache_config") or {}
    transceiver = values.get("cache_transceiver_config") or {}
    speculative = values.get("speculative_config") or {}
    balancer = (values.get("moe_config") or {}).get("load_balancer")
    batch = int(values.get("max_batch_size") or _MAX_BATCH_SIZE.get(engine, _MAX_BATCH_SIZE["tensorrt-llm"]))
    # AutoDeploy shards over world_size and refuses the other parallel fields.
    tp = int(values.get("world_size" if values.get("backend") == "_autodeploy" else "tensor_parallel_size") or 1)
    expert_parallel = int(values.get("moe_expert_parallel_size") or 0)
    fraction = kv.get("free_gpu_memory_fraction")
    return Limits(
        engine=engine,
        tp=tp,
        pp=int(values.get("pipeline_parallel_size") or 1),
        cp=int(values.get("context_parallel_size") or 1),
        moe_ep=expert_parallel if expert_parallel > 0 else 1,
        attention_dp=bool(values.get("enable_attention_dp")),
        lm_head_tp=bool(values.get("enable_lm_head_tp_in_adp")),
        expert_slots=int(balancer.get("num_slots") or 0) if isinstance(balancer, Mapping) else 0,
        max_batch_size=batch,
        max_num_tokens=int(values.get("max_num_tokens") or _MAX_NUM_TOKENS),
        max_seq_len=values.get("max_seq_len"),
        tokens_per_block=int(kv.get("tokens_per_block") or 32),
        fraction=FRACTION if fraction is None else float(fraction),
        max_tokens=kv.get("max_tokens"),
        max_gpu_total_bytes=int(kv.get("max_gpu_total_bytes") or 0),
        kv_dtype=str(kv.get("dtype") or "auto"),
        dtype=str(values.get("dtype") or "auto"),
        windows=tuple(int(window) for window in kv.get("max_attention_window") or ()),
        graph_sizes=_graph_sizes(values, batch),
        transfers=bool(transceiver.get("backend")),
        transfer_tokens=transceiver.get("max_tokens_in_buffer"),
        speculation=speculative.get("decoding_type"),
        draft_tokens=int(speculative.get("max_draft_len") or speculative.get("num_nextn_predict_layers") or 0),
        draft_model=speculative.get("speculative_model") or speculative.get("speculative_model_dir"),
    )


def _graph_sizes(values: Mapping[str, Any], batch: int) -> tuple[int, ...]:
    """CUDA graph sizes: those listed, else as TensorRT-LLM makes them (CudaGraphConfig in llm_args.py, 1.3.0rc)."""
    config = values.get("cuda_graph_config", {})
    if config is None:
        return ()
    if listed := config.get("batch_sizes"):
        return tuple(sorted(int(size) for size in listed if size <= batch))
    largest = min(int(config.get("max_batch_size") or _GRAPH_BATCH), batch)
    if config.get("enable_padding"):
        sizes = {1, 2, 4, *range(8, 129, 8), *range(192, largest + 1, 64), largest}
    else:
        sizes = {*range(1, 33), 64, 128, *(1 << power for power in range(8, largest.bit_length())), largest}
    return tuple(sorted(size for size in sizes if size <= largest))

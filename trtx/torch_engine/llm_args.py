"""The keyword arguments of ``LLM`` as they cross to the engine: TensorRT-LLM's names, the part that is honoured."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from trtx.config.torch_limits import DEFAULT_TOKENS_PER_BLOCK, TRANSPORT_OF

DEFAULT_MAX_BATCH_SIZE = 256
"""TensorRT-LLM's is 2048. The torch engine keeps sampling state and CUDA graphs for every slot, and 256 is where its
throughput on one GPU flattens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """``max_tokens`` and ``free_gpu_memory_fraction`` both bound the pool; the smaller result wins."""

    tokens_per_block: int = DEFAULT_TOKENS_PER_BLOCK
    free_gpu_memory_fraction: float = 0.9
    max_tokens: int | None = None
    enable_block_reuse: bool = True
    dtype: str = "auto"
    event_buffer_max_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    batch_sizes: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransceiverConfig:
    """``backend`` None: no KV handoff. DEFAULT, UCX and NIXL are all NIXL over UCX here."""

    backend: str | None = None
    kv_transfer_timeout_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    waiting_queue_policy: str = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmArgs:
    """Resolved. ``model`` is a directory; what is None is for the engine's process to find out."""

    model: str
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    enable_attention_dp: bool = False
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = field(default_factory=CudaGraphConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig = field(default_factory=CacheTransceiverConfig)
    enable_iter_perf_stats: bool = False
    max_stats_len: int = 1000
    deterministic: bool = False  # ours, and no engine config's: see LLM

    @property
    def transport(self) -> str | None:
        """Name of the KV transport; None: this engine takes part in no handoff."""
        backend = self.cache_transceiver_config.backend
        return TRANSPORT_OF[backend] if backend is not None else None


# msgspec 0.22.0 describes a type to itself on first use, without a lock: two threads that meet there crash the process
# (seen with several LLMs loading at once). An import happens in one thread, so it is the first use. Can go when a
# release has fixed it and a loop of concurrent first conversions survives.
msgspec.msgpack.Decoder(LlmArgs)

"""Resolved keyword arguments of ``LLM``, as the engine's process receives them.

The names are TensorRT-LLM's; only the arguments that this engine honours are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from trtx.checkpoint.tensor_parallel import RankSizes
from trtx.config.torch_limits import DEFAULT_MAX_NUM_TOKENS, DEFAULT_TOKENS_PER_BLOCK, TRANSPORT_OF

DEFAULT_MAX_BATCH_SIZE = 256
"""TensorRT-LLM's default is 2048.

The torch engine keeps sampling state and CUDA graphs for every slot, and its throughput on one GPU flattens at 256.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """KV pool settings.

    ``max_tokens`` and ``free_gpu_memory_fraction`` both limit the pool; the smaller result applies.
    """

    tokens_per_block: int = DEFAULT_TOKENS_PER_BLOCK
    free_gpu_memory_fraction: float = 0.9
    max_tokens: int | None = None
    enable_block_reuse: bool = True
    dtype: str = "auto"
    event_buffer_max_size: int = 0
    host_cache_size: int = 0  # bytes of pinned host memory for evicted blocks; 0: none
    secondary_offload_min_priority: int | None = None  # blocks of a lower retention priority are not kept there


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    batch_sizes: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransceiverConfig:
    """KV handoff settings. ``backend`` None: no handoff. DEFAULT, UCX and NIXL all mean NIXL over UCX here."""

    backend: str | None = None
    kv_transfer_timeout_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    waiting_queue_policy: str = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepConfig:
    """How a sleeping engine's memory comes back, by tag: ``NONE``, ``MEMSET``, ``CPU`` or ``PINNED``.

    The weights come back from a copy in host memory by default, which is pinned on a GPU, and with ``NONE`` from the
    checkpoint. The KV cache comes back empty.
    """

    restore_modes: dict[str, str] = field(default_factory=dict)

    @property
    def keeps_weights(self) -> bool:
        """Whether a copy of the weights stays in host memory."""
        return self.restore_modes.get("model_weights", "PINNED") != "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding settings.

    ``draft_len_schedule`` maps batch sizes to draft lengths: a length applies to batches up to its key that are larger
    than the previous key. Batches above the largest key get no drafts.
    """

    decoding_type: str
    max_draft_len: int
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    max_matching_ngram_size: int | None = None
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
    enable_global_pool: bool = False
    global_pool_size: int | None = None
    speculative_model: str | None = None
    speculative_model_dir: str | None = None  # the same, by its name in earlier releases
    eagle3_layers_to_capture: list[int] | None = None
    eagle3_one_model: bool = True  # False is refused: a head is always computed by the runner of its target

    @property
    def draft_model(self) -> str | None:
        return self.speculative_model or self.speculative_model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Engines of one host and device that share a copy of the weights.

    ``directory``: where they find each other; it must be on this machine, and only its user may enter it. ``name``: of
    this engine in the group. ``engines``: their number; the KV pools of a group divide the memory of their GPU.
    """

    directory: str
    name: str
    engines: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmArgs:
    """Resolved arguments: ``model`` is a directory. The engine's process resolves the fields that are None."""

    model: str
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    moe_tensor_parallel_size: int = -1  # -1: tensor_parallel_size by moe_expert_parallel_size
    moe_expert_parallel_size: int = -1  # -1: tensor_parallel_size by moe_tensor_parallel_size, or 1
    dtype: str = "auto"
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    enable_attention_dp: bool = False
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = field(default_factory=CudaGraphConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig = field(default_factory=CacheTransceiverConfig)
    speculative_config: SpeculativeConfig | None = None
    sleep_config: SleepConfig | None = None  # None: the engine can't sleep
    enable_iter_perf_stats: bool = False
    max_stats_len: int = 1000
    # "llguidance" or "xgrammar": guided decoding is on, with llguidance in both cases. None: off.
    guided_decoding_backend: str | None = "llguidance"
    deterministic: bool = False  # trtx's own argument, absent from engine configs: see LLM
    weight_group: WeightGroup | None = None  # likewise; None: the engine has a copy of its own
    grammar_tokenizer: str | None = None  # path or text of the tokenizer.json: grammars need each token's text
    grammar_end_ids: tuple[int, ...] = ()  # the model's own, which may end a grammar's text

    @property
    def rank_sizes(self) -> RankSizes:
        """How the ranks split layers and experts. Raises UsageError for sizes that do not fit together."""
        return RankSizes.of(self.tensor_parallel_size, self.moe_tensor_parallel_size, self.moe_expert_parallel_size)

    @property
    def guides(self) -> bool:
        """Whether requests may follow grammars. A grammar needs the text of every token, so it needs a tokenizer."""
        return self.guided_decoding_backend is not None and self.grammar_tokenizer is not None

    @property
    def transport(self) -> str | None:
        """Name of the KV transport, or None if this engine takes part in no handoff."""
        backend = self.cache_transceiver_config.backend
        return TRANSPORT_OF[backend] if backend is not None else None


# msgspec 0.22.0 caches its description of a type on first use before it has filled it in, without a lock (_core.c,
# DataclassInfo_Convert). A second thread that converts to the type meanwhile reads a null pointer, and the process ends
# with SIGSEGV. Seen with several LLMs loading at once, and in a frontend with two requests for /trtx/workers at once.
# An import runs in one thread, so the first use happens here. Remove this once a msgspec release has fixed it and a
# loop of concurrent first conversions survives.
msgspec.msgpack.Decoder(LlmArgs)

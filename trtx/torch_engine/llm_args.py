"""The keyword arguments of ``LLM``: TensorRT-LLM's names, the part of them that the torch engine honours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from trtx.config import schema
from trtx.config.torch_fields import ignored_fields, refused_fields
from trtx.config.torch_limits import DEFAULT_TOKENS_PER_BLOCK, TRANSPORT_OF, outside_limits

DEFAULT_MAX_BATCH_SIZE = 256
"""TensorRT-LLM's is 2048. The torch engine keeps sampling state and CUDA graphs for every slot, and 256 is where its
throughput on one GPU flattens."""

_IGNORED = "the torch engine leaves it out: it changes speed or memory alone"


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
    enable_attention_dp: bool = False
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = field(default_factory=CudaGraphConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig = field(default_factory=CacheTransceiverConfig)
    enable_iter_perf_stats: bool = False
    max_stats_len: int = 1000
    return_perf_metrics: bool = False

    @property
    def transport(self) -> str | None:
        """Name of the KV transport; None: this engine takes part in no handoff."""
        backend = self.cache_transceiver_config.backend
        return TRANSPORT_OF[backend] if backend is not None else None


# msgspec 0.22.0 describes a type to itself on first use, without a lock: two threads that meet there crash the process
# (seen with several LLMs loading at once). An import happens in one thread, so it is the first use. Can go when a
# release has fixed it and a loop of concurrent first conversions survives.
msgspec.msgpack.Decoder(LlmArgs)

NESTED: dict[str, type[Any]] = {
    "kv_cache_config": KvCacheConfig,
    "cuda_graph_config": CudaGraphConfig,
    "scheduler_config": SchedulerConfig,
    "cache_transceiver_config": CacheTransceiverConfig,
}


def resolve_llm_args(model: str, arguments: Mapping[str, Any]) -> tuple[LlmArgs, dict[str, str]]:
    """Returns the resolved arguments, and for each one that was given but is left out why that is right.

    Raises ValueError for a name that no version of TensorRT-LLM knows (with the nearest one), for a wrong type or
    range, for a value without which answers would be others (``trtx.config.torch_fields``), and for one that the engine
    can't run with (``trtx.config.torch_limits``).
    """
    plain = {name: _plain(value) for name, value in arguments.items()}
    problems = [found.message for found in schema.findings(plain) if found.kind != "other-version"]
    if problems:
        raise ValueError("; ".join(problems))
    if refused := [str(field) for field in refused_fields(plain)]:
        raise ValueError("; ".join(refused))
    if outside := [str(found) for found in outside_limits(plain)]:
        raise ValueError("; ".join(outside))
    taken: dict[str, Any] = {"model": model}
    for name, value in plain.items():
        if name in NESTED and isinstance(value, Mapping):
            known = _names(NESTED[name])
            taken[name] = {key: v for key, v in value.items() if key in known and not _means_default(key, v)}
        elif name in _names(LlmArgs) and (value is not None or name == "cuda_graph_config"):
            taken[name] = value
    try:
        args = msgspec.convert(taken, LlmArgs)
    except msgspec.ValidationError as error:
        raise ValueError(f"the torch engine's arguments: {error}") from error
    return args, dict.fromkeys(ignored_fields(plain), _IGNORED)


def _names(model: type[Any]) -> frozenset[str]:
    return frozenset(f.name for f in fields(model))


def _means_default(name: str, value: Any) -> bool:
    """None, for fields whose own type has no None: TensorRT-LLM's way to say "as if it were not there"."""
    return value is None and name not in ("max_tokens", "backend", "batch_sizes")


def _plain(value: Any) -> Any:
    """Config objects (dataclasses, pydantic models) as the mappings that YAML would give."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value

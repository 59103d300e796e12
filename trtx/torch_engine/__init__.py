"""The embedded engine: an LLM on PyTorch that speaks TensorRT-LLM's LLM API, on a CPU and on CUDA.

Owns requests, scheduling, KV blocks, the engine's process and its API; inside it ``runner`` owns tensors and
``handoff`` moves KV between engines. It does not serve, nor look for models: ``worker`` and ``checkpoint`` do.
Enter through :class:`LLM`. It always holds that a request's greedy tokens depend neither on batching, chunking,
prefix hits nor preemption, and that every block is free, held or cached, exactly once.
"""

from trtx.torch_engine.batch import Logprob
from trtx.torch_engine.llm_args import CacheTransceiverConfig, CudaGraphConfig, KvCacheConfig, LlmArgs, SchedulerConfig
from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.results import (
    CompletionOutput,
    DisaggregatedParams,
    RequestError,
    RequestFailed,
    RequestOutput,
)
from trtx.torch_engine.llmapi.sampling import SamplingParams

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "KvCacheConfig",
    "LlmArgs",
    "Logprob",
    "RequestError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]

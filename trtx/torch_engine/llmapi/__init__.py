"""The caller's side of the engine, in a worker's process: TensorRT-LLM's LLM API.

It owns the public classes (:class:`LLM`, its parameters and results), validates and resolves each request once, and
controls the engine's process through a socket. It computes nothing and uses no device: ``trtx.torch_engine.core`` does.
Callers enter through :class:`LLM`; :class:`OfflineEngine` runs requests without a server. Every request ends: with its
result, with its error, or with the engine's death.
"""

from typing import Any

from trtx.names import public
from trtx.torch_engine.llm_args import CacheTransceiverConfig, CudaGraphConfig, KvCacheConfig, LlmArgs, SchedulerConfig
from trtx.torch_engine.llmapi.completions import CompletionOutput
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.encoded import Embedding, PreparedPicture
from trtx.torch_engine.llmapi.encoder import MultimodalEncoder
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.offline import OfflineEngine
from trtx.torch_engine.llmapi.request_errors import MediaNeeded, RequestError, RequestFailed
from trtx.torch_engine.llmapi.results import RequestOutput
from trtx.torch_engine.llmapi.retention import KvCacheRetentionConfig
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.logits_processor import BatchedLogitsProcessor, LogitsProcessor
from trtx.torch_engine.messages import Logprob, MediaSpan

TorchLlmArgs = LlmArgs  # TensorRT-LLM has both names too

__all__ = [
    "LLM",
    "BatchedLogitsProcessor",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "Embedding",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "LogitsProcessor",
    "Logprob",
    "MediaNeeded",
    "MediaSpan",
    "MultimodalEncoder",
    "OfflineEngine",
    "PreparedPicture",
    "RequestError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]


def __getattr__(name: str) -> Any:
    return public(__name__, name)

"""Names that trtx or Dynamo import and of which the stand-in needs no more than their shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorrt_llm._facts import dataclass
from tensorrt_llm._standin import absent

SchedulingParams = dataclass("SchedulingParams")


def _check_conversation(self: Any) -> None:
    if not self.conversation_id.strip():
        raise ValueError("conversation_id must be non-empty")


ConversationParams = dataclass("ConversationParams", {"__post_init__": _check_conversation})


class KvCacheRetentionConfig:
    """Retention priorities of token ranges: a hint the torch engine does not take."""

    class TokenRangeRetentionConfig:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise absent("KvCacheRetentionConfig")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise absent("KvCacheRetentionConfig")


class AsyncLLM:
    """The LLM on Ray, for reinforcement learning."""

    def __init__(
        self,
        placement_groups: Any = None,
        placement_bundle_indices: Any = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        raise absent("AsyncLLM")


class MpiCommSession:
    """Ranks that mpirun started, for an LLM inside them."""

    def __init__(self, comm: Any = None, n_workers: int = 1) -> None:
        if n_workers <= 0:
            raise ValueError(f"n_workers must be non-negative, but got {n_workers}")
        raise absent("MpiCommSession")


class MetricsCollector:
    """TensorRT-LLM's own Prometheus families; trtx has its own."""

    def __init__(self, labels: dict[str, str]) -> None:
        raise absent("MetricsCollector")


class VideoData:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise absent("video input")


async def async_load_video(*args: Any, **kwargs: Any) -> Any:
    raise absent("video input")


def tokenizer_factory(obj: Any, **kwargs: Any) -> Any:
    """The transformers tokenizer of a directory; anything else is one already, or None."""
    if not isinstance(obj, (str, Path)):
        return obj
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(obj), **kwargs)


KvCacheRetentionConfig.__module__ = "tensorrt_llm.bindings.executor"
AsyncLLM.__module__ = "tensorrt_llm._torch.async_llm"
MpiCommSession.__module__ = "tensorrt_llm.llmapi.mpi_session"
MetricsCollector.__module__ = "tensorrt_llm.metrics.collector"
VideoData.__module__ = "tensorrt_llm.inputs.multimodal_data"

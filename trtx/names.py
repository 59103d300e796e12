"""The names of the Python API, and the replacements for names of TensorRT-LLM that trtx lacks.

A module's ``__getattr__`` calls :func:`public`, so the API is imported only when one of its names is accessed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOME = "trtx.torch_engine.llmapi"
PUBLIC = frozenset((
    "LLM", "BatchedLogitsProcessor", "CacheTransceiverConfig", "CompletionOutput", "CudaGraphConfig",
    "DisaggregatedParams", "Embedding", "GuidedDecodingParams", "KvCacheConfig", "KvCacheRetentionConfig", "LlmArgs",
    "LogitsProcessor", "Logprob", "MediaNeeded", "MediaSpan", "MultimodalEncoder", "OfflineEngine", "PreparedPicture",
    "RequestError", "RequestFailed", "RequestOutput", "SamplingParams", "SchedulerConfig", "TorchLlmArgs",
))  # fmt: skip
"""The public names of :data:`HOME`. ``trtx`` exports the same names, and so does ``trtx.torch_engine``, their location
in earlier versions."""

_NO_SPECULATION = "does not speculate: leave speculative_config out, the tokens are the same"
_SPEED_ALONE = "has no such setting, which changes speed or memory alone: leave it out"
_EXACT = "computes exact attention alone: leave sparse_attention_config out, or use the engine tensorrt-llm"
_NO_BUILD = "builds no engine files: it serves a checkpoint as it is, which trtx build can quantize"
_NO_IMAGES_MADE = "makes text alone: use TensorRT-LLM itself"

# Names in ``tensorrt_llm`` and ``tensorrt_llm.llmapi``. Each text completes a sentence "the embedded engine ...".
ABSENT = {
    "AsyncLLM": "has one class: use LLM.generate_async, whose result can be awaited",
    "LoRARequest": "serves no adapters: merge the adapter into the checkpoint, or use the engine tensorrt-llm",
    "ConversationParams": "keeps no conversations: leave conversation_params out, no answer depends on it",
    "DisaggScheduleStyle": "starts with the prompt: leave schedule_style out",
    "AttentionDpConfig": "runs on one device: leave it out, or use the engine tensorrt-llm",
    "MpiCommSession": "runs on one device: leave it out, or use the engine tensorrt-llm",
    "MoeConfig": "has one way to compute experts: leave moe_config out, no answer depends on it",
    "QuantAlgo": "takes the quantization that config.json of the checkpoint says: make one with trtx build --quant",
    "QuantConfig": "takes the quantization that config.json of the checkpoint says: make one with trtx build --quant",
    "CalibConfig": "does not calibrate: make a quantized checkpoint with trtx build --quant",
    "TrtLlmArgs": _NO_BUILD,
    **dict.fromkeys(("BuildConfig", "BuildCacheConfig"), _NO_BUILD),
    **dict.fromkeys(
        (
            "AutoDecodingConfig", "DraftTargetDecodingConfig", "Eagle3DecodingConfig", "EagleDecodingConfig",
            "LookaheadDecodingConfig", "MedusaDecodingConfig", "MTPDecodingConfig", "NGramDecodingConfig",
            "PARDDecodingConfig", "SADecodingConfig", "SAEnhancerConfig", "SaveHiddenStatesDecodingConfig",
            "UserProvidedDecodingConfig",
        ),
        _NO_SPECULATION,
    ),
    **dict.fromkeys(
        (
            "BatchingType", "CapacitySchedulerPolicy", "ContextChunkingPolicy", "DynamicBatchConfig",
            "ExtendedRuntimePerfKnobConfig", "PrometheusMetricsConfig", "TorchCompileConfig",
        ),
        _SPEED_ALONE,
    ),
    **dict.fromkeys(
        ("DeepSeekSparseAttentionConfig", "RocketSparseAttentionConfig", "SkipSoftmaxAttentionConfig"), _EXACT
    ),
    **dict.fromkeys(
        (
            "VisualGen", "VisualGenArgs", "VisualGenMetrics", "VisualGenOutput", "VisualGenParams", "VisualGenResult",
            "ExtraParamSchema",
        ),
        _NO_IMAGES_MADE,
    ),
}  # fmt: skip


def public(module: str, name: str) -> Any:
    """Returns the value of ``name`` in ``module``, for the module's ``__getattr__``.

    Raises ImportError for a name of TensorRT-LLM that trtx lacks, because ``from ... import`` shows its message, and
    AttributeError for any other name.
    """
    if name in PUBLIC and module != HOME:
        return getattr(import_module(HOME), name)
    if reason := ABSENT.get(name):
        raise ImportError(f"{module} has no {name}: the embedded engine {reason}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

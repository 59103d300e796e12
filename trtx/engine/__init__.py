"""The boundary between a worker and its engine: which LLM stands behind it, and its few types.

Owns the choice of engine. Does not run one: ``tensorrt_llm`` and ``trtx.torch_engine`` do.
Enter through :func:`load`. Every engine offers TensorRT-LLM's LLM API, so nothing above this
line asks which engine it talks to.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trtx.errors import UsageError

EngineKind = Literal["torch", "tensorrt-llm", "paced"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)


@dataclass(frozen=True, slots=True)
class EngineApi:
    """The names of TensorRT-LLM's LLM API that a worker uses, from one engine."""

    kind: EngineKind
    LLM: Any
    SamplingParams: Any
    DisaggregatedParams: Any
    RequestError: type[Exception]


def resolve_kind(kind: str, *, has_gpu: bool) -> EngineKind:
    """``auto`` is tensorrt-llm where it can be imported and a GPU is there, else torch."""
    if kind == "auto":
        installed = importlib.util.find_spec("tensorrt_llm") is not None
        return "tensorrt-llm" if installed and has_gpu else "torch"
    if kind not in ENGINE_KINDS:
        raise UsageError(f"engine {kind!r} is not known; expected auto, simulated or one of {', '.join(ENGINE_KINDS)}")
    return kind  # type: ignore[return-value]


def load(kind: EngineKind) -> EngineApi:
    """Imports the engine. Slow: never call it from ``--help``, ``--dry-run`` or the launcher."""
    if kind == "tensorrt-llm":
        return _load_tensorrt_llm()
    if kind == "paced":
        from trtx.engine import paced as module
    else:
        from trtx import torch_engine as module  # type: ignore[no-redef]
    return EngineApi(kind, module.LLM, module.SamplingParams, module.DisaggregatedParams, module.RequestError)


def _load_tensorrt_llm() -> EngineApi:
    try:
        from tensorrt_llm import LLM
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.llmapi import DisaggregatedParams
        from tensorrt_llm.llmapi.llm import SamplingParams
    except ImportError as error:
        raise UsageError(
            f"engine tensorrt-llm needs the package tensorrt_llm ({error}); install trtx[tensorrt-llm], "
            "or choose --engine torch"
        ) from error
    return EngineApi("tensorrt-llm", LLM, SamplingParams, DisaggregatedParams, RequestError)

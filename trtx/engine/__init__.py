"""The boundary between a worker and its engine: which LLM stands behind it, and its few types.

Owns the choice of engine. Does not run one: ``tensorrt_llm`` and ``trtx.torch_engine`` do.
Enter through :func:`load`. Every engine offers TensorRT-LLM's LLM API, so nothing above this line asks which engine
it talks to: where they differ, :class:`EngineApi` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trtx.engine.api import ENGINE_KINDS, EngineApi, EngineKind
from trtx.engine.tensorrt_llm.installed import installed_version, needs_gpu
from trtx.errors import UsageError

__all__ = ["ENGINE_KINDS", "EngineApi", "EngineKind", "installed_version", "load", "needs_gpu", "resolve_kind"]


def resolve_kind(kind: str, *, has_gpu: bool) -> EngineKind:
    """``auto`` is tensorrt-llm where it is installed and has the GPU it needs, else torch."""
    if kind == "auto":
        version = installed_version()
        return "tensorrt-llm" if version is not None and (has_gpu or not needs_gpu(version)) else "torch"
    if kind not in ENGINE_KINDS:
        raise UsageError(f"engine {kind!r} is not known; expected auto, simulated or one of {', '.join(ENGINE_KINDS)}")
    return kind  # type: ignore[return-value]


def load(kind: EngineKind) -> EngineApi:
    """Imports the engine. Slow: never call it from ``--help``, ``--dry-run`` or the launcher."""
    if kind == "tensorrt-llm":
        from trtx.engine.tensorrt_llm.life import load_api

        return load_api()
    from trtx.torch_engine.messages import Logprob

    if kind == "paced":
        from trtx.engine import paced as module
    else:
        from trtx.torch_engine import llmapi as module  # type: ignore[no-redef]

    return EngineApi(
        kind=kind,
        start_llm=_starter(module),
        SamplingParams=module.SamplingParams,
        DisaggregatedParams=module.DisaggregatedParams,
        Logprob=Logprob,
        RequestError=module.RequestError,
        RequestFailed=module.RequestFailed,
    )


def _starter(module: ModuleType) -> Any:
    def start_llm(model: Path, config: Mapping[str, Any]) -> Any:
        return module.LLM(str(model), **config)

    return start_llm

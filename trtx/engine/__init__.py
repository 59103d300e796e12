"""The boundary between a worker and its engine: the choice of engine and its interface.

Owns the choice of engine, the interface that each engine implements (``api``), and the data that worker and launcher
share about a worker (``worker_status``, ``ranks``). Does not run an engine: ``tensorrt_llm`` and ``trtx.torch_engine``
do. Entry point: :func:`load`. Always holds: code above this room never checks which engine it uses; differences are
expressed by :class:`EngineApi` and :class:`Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtx.engine.kinds import ENGINE_KINDS, MODEL_ENGINES, EngineKind
from trtx.engine.tensorrt_llm.installed import installed_version, needs_gpu
from trtx.errors import UsageError
from trtx.torch_engine.kv_fault import VARIABLE as KV_FAULT_VARIABLE
from trtx.torch_engine.kv_fault import parse_kv_fault

if TYPE_CHECKING:
    from trtx.engine.api import Engine, EngineApi

__all__ = [
    "ENGINE_KINDS",
    "KV_FAULT_VARIABLE",
    "MODEL_ENGINES",
    "Engine",
    "EngineApi",
    "EngineKind",
    "installed_version",
    "load",
    "needs_gpu",
    "parse_kv_fault",
    "resolve_kind",
]


def resolve_kind(kind: str, *, has_gpu: bool) -> EngineKind:
    """Resolves ``auto`` to tensorrt-llm if it is installed and has the GPU that it needs, else to torch.

    Raises UsageError for an unknown kind.
    """
    if kind == "auto":
        version = installed_version()
        return "tensorrt-llm" if version is not None and (has_gpu or not needs_gpu(version)) else "torch"
    if kind not in ENGINE_KINDS:
        raise UsageError(f"engine {kind!r} is not known; expected auto, simulated or one of {', '.join(ENGINE_KINDS)}")
    return kind  # type: ignore[return-value]


def load(kind: EngineKind) -> EngineApi:
    """Imports the engine and returns its API. Slow: do not call it from ``--help``, ``--dry-run`` or the launcher."""
    if kind == "tensorrt-llm":
        from trtx.engine.tensorrt_llm.life import load_api

        return load_api()
    from trtx.engine import embedded

    return embedded.load_api(kind)


def __getattr__(name: str) -> Any:
    # Only workers use these two; importing them takes the launcher and the guardian three times as long as the rest.
    if name in ("Engine", "EngineApi"):
        from trtx.engine import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)

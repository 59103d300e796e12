"""All differences between TensorRT-LLM 1.2.1 and the releases after 1.3.0rc22, detected by probing.

Names are probed instead of comparing versions where possible, because nightly builds carry the last release's number.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from trtx.errors import UsageError

_NODES, _PROCESSES = 1 << 8, 1 << 6
_MACHINES = 1 << 10
# Before the fix in PR #12528, a prefill worker with pipeline stages hangs in its executor (#11789).
_PIPELINED_PREFILL = Version("1.3.0rc10")
_BACKENDS = ("pytorch", "_autodeploy")


def llm_class(backend: str) -> Any:
    """The LLM class for ``backend``. Raises UsageError for a backend that trtx does not support."""
    if backend == "pytorch":
        return importlib.import_module("tensorrt_llm").LLM
    if backend == "_autodeploy":
        return importlib.import_module("tensorrt_llm._torch.auto_deploy").LLM
    gone = " (removed after 1.2, TensorRT-LLM PR #15767)" if backend == "tensorrt" else ""
    raise UsageError(f"backend is {backend!r}{gone}; expected one of {', '.join(_BACKENDS)}")


def conversation_params() -> Any:
    """``ConversationParams``, which was added after 1.3.0rc20; None in earlier versions."""
    return getattr(importlib.import_module("tensorrt_llm.llmapi"), "ConversationParams", None)


def scheduling_params() -> Any:
    return importlib.import_module("tensorrt_llm.scheduling_params").SchedulingParams


def new_request_ids(worker_id: int) -> Callable[[], int | None]:
    """Returns a function that makes ``disagg_request_id``s, unique per worker as far as the layout has bits for worker
    ids.

    1.2.1 has no such ids and uses the prefill engine's own ``ctx_request_id``, so the function returns None. 1.3.0rc22
    changed ``get_global_disagg_request_id(machine_id)`` (10 bits) to ``(node_id, process_id)`` (8 and 6 bits).
    """
    utils = importlib.import_module("tensorrt_llm.llmapi.disagg_utils")
    make = getattr(utils, "get_global_disagg_request_id", None)
    if make is None:
        return lambda: None
    if "process_id" in inspect.signature(make).parameters:
        node, process = divmod(worker_id % (_NODES * _PROCESSES), _PROCESSES)
        return lambda: int(make(node, process))
    return lambda: int(make(worker_id % _MACHINES))


def accepts(call: Callable[..., Any], name: str) -> bool:
    """Whether a method of the LLM accepts a keyword: ``priority`` was added after 1.3.0rc7,
    ``conversation_params`` later.
    """
    return name in inspect.signature(call).parameters


def can_preprocess(llm: Any) -> bool:
    """Whether a prompt's images can be preprocessed separately from ``generate_async``; not possible up to 1.3.0rc7."""
    return callable(getattr(llm, "preprocess", None))


def argument(llm: Any, name: str) -> Any:
    """The value that an LLM resolved for one of its arguments; None if its version or backend has no such argument."""
    return getattr(llm.args, name, None)


def follows_conversations(llm: Any) -> bool:
    """Whether the engine keeps a conversation on one attention-DP rank by itself."""
    section, name = argument(llm, "attention_dp_config"), "kv_cache_routing_conversation_affinity"
    return (section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)) is True


def kv_capacity(llm: Any) -> Mapping[str, int]:
    """``{maxNumBlocks, tokensPerBlock, maxNumTokens}`` of the KV pool; empty up to 1.3.0rc7, and without a pool."""
    ask = getattr(llm, "get_kv_cache_capacity", None)
    return (ask() or {}) if ask is not None else {}


def health_call(llm: Any) -> Callable[[], bool] | None:
    """The engine's own health check (since PR #12718); None if it has none, which means unknown, not healthy."""
    for holder, name in ((llm, "_check_health"), (getattr(llm, "_executor", None), "check_health")):
        check = getattr(holder, name, None)
        if callable(check):
            return check  # type: ignore[no-any-return]
    return None


def fatal_error(llm: Any) -> BaseException | None:
    """The exception that the engine died of, if it reports one."""
    error = getattr(getattr(llm, "_executor", None), "_fatal_error", None)
    return error if isinstance(error, BaseException) else None


def pipelines_prefill(version: str) -> bool:
    """Whether a prefill worker may have pipeline stages. A version that can't be parsed is treated as new."""
    try:
        return Version(version) >= _PIPELINED_PREFILL
    except InvalidVersion:
        return True

"""From a worker's options to an LLM that runs, and the facts that Dynamo registers about it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx import engine
from trtx.engine import EngineApi
from trtx.errors import LaunchError
from trtx.torch_engine.messages import HandoffStats
from trtx.worker.options import WorkerOptions

EVENT_BUFFER = 100_000
"""KV events kept until they are polled; Dynamo's TensorRT-LLM backend asks for as many when it publishes."""
SHUTDOWN_SECONDS = 20.0
"""Longest wait for ``LLM.shutdown``: it may hang when an engine's ranks are dead (TensorRT-LLM PR #16312)."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running LLM. ``context_length`` counts prompt and output together; sizes are in tokens and blocks."""

    api: EngineApi
    llm: Any
    context_length: int
    block_size: int | None
    num_blocks: int | None
    max_batch_size: int | None
    max_num_tokens: int | None
    publishes_kv_events: bool

    @property
    def engine_pid(self) -> int:
        """The process that holds the device: the engine's own, or this one."""
        return getattr(self.llm, "engine_pid", None) or os.getpid()

    def device_memory_bytes(self) -> int:
        ask = getattr(self.llm, "device_memory_bytes", None)
        return int(ask()) if ask is not None else 0

    def is_alive(self) -> bool:
        """False after a fatal error; without a health call (TensorRT-LLM before PR #12718), never."""
        check = getattr(self.llm, "_check_health", None)
        return True if check is None else bool(check())

    def handoff_stats(self) -> HandoffStats | None:
        """Totals of KV handoffs since the start, and the leases held now; None where the engine counts none."""
        ask = getattr(self.llm, "handoff_stats", None)
        return ask() if ask is not None else None

    def shutdown(self) -> bool:
        """Ends the engine; False when it did not end in time, so that the caller must not wait for its threads."""
        done = threading.Thread(target=self.llm.shutdown, name="llm-shutdown", daemon=True)
        done.start()
        done.join(SHUTDOWN_SECONDS)
        return not done.is_alive()


def probe_token_id(model: Path) -> int:
    """The token of a health probe: the checkpoint's beginning of text, else 1, as in Dynamo's own backends.

    Read from config.json: asking the LLM for its tokenizer would import transformers in the worker's event loop,
    seconds in which the model is registered and its endpoint is not.
    """
    try:
        token_id = json.loads((model / "config.json").read_text(encoding="utf-8")).get("bos_token_id")
    except (OSError, ValueError):
        return 1
    return token_id if isinstance(token_id, int) else 1


def load(options: WorkerOptions) -> LoadedEngine:
    """Blocks until the engine is ready to serve, minutes for a large model; raises LaunchError."""
    api = engine.load(options.engine)
    arguments = _arguments(options)
    llm = api.LLM(str(options.model), **arguments)
    capacity = llm.get_kv_cache_capacity() or {}
    context_length = min((n for n in (_fact(llm, "max_seq_len"), capacity.get("maxNumTokens")) if n), default=None)
    if context_length is None:
        raise LaunchError(
            f"engine {options.engine} says neither max_seq_len nor a KV capacity; set max_seq_len in the engine config"
        )
    events = arguments.get("kv_cache_config") or {}
    return LoadedEngine(
        api=api,
        llm=llm,
        context_length=context_length,
        block_size=capacity.get("tokensPerBlock"),
        num_blocks=capacity.get("maxNumBlocks"),
        max_batch_size=_fact(llm, "max_batch_size"),
        max_num_tokens=_fact(llm, "max_num_tokens"),
        publishes_kv_events=bool(capacity.get("maxNumBlocks")) and bool(events.get("event_buffer_max_size")),
    )


def _fact(llm: Any, name: str) -> int | None:
    """What the engine resolved, where it says so itself (the torch engine), else what its arguments say."""
    value = getattr(llm, name, None)
    return value if value is not None else getattr(llm.args, name, None)


def _arguments(options: WorkerOptions) -> dict[str, Any]:
    """The engine config, with what a worker needs of its engine switched on unless the config says otherwise."""
    cache = dict(options.llm_args.get("kv_cache_config") or {})
    if cache.get("enable_block_reuse", True):
        cache.setdefault("event_buffer_max_size", EVENT_BUFFER)
    arguments = {"enable_iter_perf_stats": True, **options.llm_args, "kv_cache_config": cache}
    if options.role != "agg":
        # Without one, an engine refuses every request that comes from or goes to another engine.
        arguments.setdefault("cache_transceiver_config", {"backend": "NIXL"})
    return arguments

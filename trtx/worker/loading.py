"""From a worker's options to an LLM that runs, and the facts that Dynamo registers about it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx import engine
from trtx.engine import EngineApi
from trtx.engine.tensorrt_llm import versions
from trtx.errors import LaunchError, UsageError
from trtx.text import StopStrings, TextStream, Tokenizer, load_tokenizer
from trtx.torch_engine.messages import HandoffStats
from trtx.worker.options import WorkerOptions
from trtx.worker.request import InvalidRequest, WorkerRequest

logger = logging.getLogger(__name__)

EVENT_BUFFER = 100_000
"""KV events kept until they are polled; Dynamo's TensorRT-LLM backend asks for as many when it publishes."""
TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default, for an engine that does not say what it uses (1.3.0rc7 and before)."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running LLM. ``context_length`` counts prompt and output together; sizes are in tokens and blocks."""

    api: EngineApi
    llm: Any
    tokenizer: Tokenizer | None  # for stop strings; None: the model has no fast one
    context_length: int
    block_size: int | None
    num_blocks: int | None
    max_batch_size: int | None
    max_num_tokens: int | None
    dp_size: int  # attention-DP ranks, each with KV of its own; 1 without attention DP
    publishes_kv_events: bool
    follows_conversations: bool  # the engine itself keeps a conversation on one attention-DP rank
    takes_priority: bool
    load_seconds: float
    shutdown_seconds: float  # longest wait for LLM.shutdown

    def scheduling(self, request: WorkerRequest) -> dict[str, Any]:
        """Keyword arguments of ``generate_async`` that say when and on which attention-DP rank a request runs."""
        hints: dict[str, Any] = {}
        if request.priority is not None and self.takes_priority:
            hints["priority"] = request.priority
        if self.follows_conversations:  # a rank that is given beats the conversation's
            if request.conversation_id is not None:
                hints["conversation_params"] = self.api.ConversationParams(conversation_id=request.conversation_id)
        elif request.dp_rank is not None and self.dp_size > 1:
            hints["scheduling_params"] = self.api.SchedulingParams(
                attention_dp_rank=request.dp_rank, attention_dp_relax=False
            )
        return hints

    def stop_strings(self, request: WorkerRequest) -> StopStrings:
        """Raises InvalidRequest where there is no tokenizer to find them with."""
        if self.tokenizer is None:
            raise InvalidRequest("stop strings need a fast tokenizer, which this model has not; use stop_token_ids")
        return StopStrings(
            request.stop_strings,
            TextStream(self.tokenizer, skip_special_tokens=request.skip_special_tokens),
            include=request.includes_stop_string,
            min_tokens=request.min_tokens,
        )

    @property
    def engine_pid(self) -> int:
        """The process that holds the device: the engine's own, or this one."""
        return getattr(self.llm, "engine_pid", None) or os.getpid()

    def device_memory_bytes(self) -> int:
        ask = getattr(self.llm, "device_memory_bytes", None)
        return int(ask()) if ask is not None else 0

    def is_alive(self) -> bool:
        """False after a fatal error; without a health call, never: that means unknown."""
        check = versions.health_call(self.llm)
        return True if check is None else bool(check())

    def handoff_stats(self) -> HandoffStats | None:
        """Totals of KV handoffs since the start, and the leases held now; None where the engine counts none."""
        ask = getattr(self.llm, "handoff_stats", None)
        return ask() if ask is not None else None

    def shutdown(self) -> bool:
        """Ends the engine; False when it did not end in time, so that the caller must not wait for its threads."""
        done = threading.Thread(target=self.llm.shutdown, name="llm-shutdown", daemon=True)
        done.start()
        done.join(self.shutdown_seconds)
        return not done.is_alive()


def probe_token_id(model: Path) -> int:
    """The token of a health probe: the checkpoint's beginning of text, else 1, as in Dynamo's own backends.

    Read from config.json: asking the LLM for its tokenizer would import transformers in the worker's event loop,
    seconds in which the model is registered and its endpoint is not.
    """
    token_id = _model_config(model).get("bos_token_id")
    return token_id if isinstance(token_id, int) else 1


def load(options: WorkerOptions) -> LoadedEngine:
    """Blocks until the engine is ready to serve, minutes for a large model; raises LaunchError or UsageError."""
    started = time.monotonic()
    api = engine.load(options.engine)
    if options.role == "encode":
        if api.start_encoder is None:
            raise UsageError(f"engine {options.engine} has no vision encoder; use --engine tensorrt-llm for encode")
        llm = api.start_encoder(options.model, options.llm_args)
    else:
        llm = api.start_llm(options.model, _arguments(options))
    seconds = time.monotonic() - started
    logger.info("%s loaded %s in %.1f s", options.name, options.model, seconds)
    if left_out := getattr(llm, "unsupported_fields", None):
        logger.info("%s leaves out what changes speed or memory alone: %s", options.name, ", ".join(left_out))
    return _describe(options, api, llm, seconds)


def _describe(options: WorkerOptions, api: EngineApi, llm: Any, load_seconds: float) -> LoadedEngine:
    serves_tokens = options.role != "encode"
    capacity = versions.kv_capacity(llm) if serves_tokens else {}
    has_pool = serves_tokens and (not capacity or bool(capacity.get("maxNumBlocks")))  # empty: it does not say
    cache = _arguments(options)["kv_cache_config"]
    block_size = capacity.get("tokensPerBlock") or cache.get("tokens_per_block") or TOKENS_PER_BLOCK
    follows = _value(llm.args, "attention_dp_config", "kv_cache_routing_conversation_affinity") is True
    if follows and api.ConversationParams is None:
        raise LaunchError(
            "attention_dp_config.kv_cache_routing_conversation_affinity is on, and this TensorRT-LLM has no "
            "ConversationParams, which came after 1.3.0rc20; leave it out, or install a later release"
        )
    return LoadedEngine(
        api=api,
        llm=llm,
        tokenizer=_tokenizer(options.model) if serves_tokens else None,
        context_length=_context_length(options, llm, capacity),
        block_size=block_size if serves_tokens else None,
        num_blocks=capacity.get("maxNumBlocks"),
        max_batch_size=_fact(llm, "max_batch_size"),
        max_num_tokens=_fact(llm, "max_num_tokens"),
        dp_size=(_fact(llm, "tensor_parallel_size") or 1) if getattr(llm.args, "enable_attention_dp", False) else 1,
        publishes_kv_events=has_pool and bool(cache.get("event_buffer_max_size")),
        follows_conversations=follows,
        takes_priority=serves_tokens and versions.accepts(llm.generate_async, "priority"),
        load_seconds=load_seconds,
        shutdown_seconds=api.shutdown_seconds if options.shutdown_seconds is None else options.shutdown_seconds,
    )


def _context_length(options: WorkerOptions, llm: Any, capacity: Mapping[str, int]) -> int:
    """The smallest of what the arguments, the model's positions and the KV pool allow.

    TensorRT-LLM leaves ``args.max_seq_len`` None where the config has none: its ranks take the model's positions.
    """
    asked = _fact(llm, "max_seq_len") or _max_positions(options.model)
    context_length = min((n for n in (asked, capacity.get("maxNumTokens")) if n), default=None)
    if context_length is None:
        raise LaunchError(
            f"engine {options.engine} says neither max_seq_len nor a KV capacity, and {options.model}/config.json no "
            "max_position_embeddings; set max_seq_len in the engine config"
        )
    return context_length


def _max_positions(model: Path) -> int | None:
    config = _model_config(model)
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _model_config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _tokenizer(model: Path) -> Tokenizer | None:
    """Any failure costs the stop strings alone: the frontend has a tokenizer of its own."""
    try:
        return load_tokenizer(model)
    except Exception as error:
        logger.warning("no fast tokenizer for %s (%s): requests with stop strings will be refused", model, error)
        return None


def _fact(llm: Any, name: str) -> int | None:
    """What the engine resolved, where it says so itself (the torch engine), else what its arguments say."""
    value = getattr(llm, name, None)
    return value if value is not None else getattr(llm.args, name, None)


def _value(holder: Any, section: str, name: str) -> Any:
    found = getattr(holder, section, None)
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


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

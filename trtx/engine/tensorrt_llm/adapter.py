"""The engine interface for a loaded TensorRT-LLM, across its versions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.checkpoint.facts import context_length_of, read_config
from trtx.engine.api import (
    Engine,
    EngineFacts,
    EngineTimes,
    Hints,
    MediaSpan,
    PicturePrompt,
    ReadyPrompt,
    Result,
    Row,
    Transfer,
)
from trtx.engine.tensorrt_llm import multimodal, versions
from trtx.errors import LaunchError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default, used for versions that do not report their block size (1.3.0rc7 and before)."""


class TensorRtEngine(Engine):
    """Wraps ``tensorrt_llm.LLM`` or its ``MultimodalEncoder``. Its ranks are child processes, which the worker records.

    Raises LaunchError if the package lacks a feature that the arguments request.
    """

    def __init__(self, llm: Any, facts: EngineFacts) -> None:
        self._llm = llm
        self.facts = facts
        self._takes_priority = versions.accepts(llm.generate_async, "priority")
        self._follows_conversations = versions.follows_conversations(llm)
        if self._follows_conversations and versions.conversation_params() is None:
            raise LaunchError(
                "attention_dp_config.kv_cache_routing_conversation_affinity is on, and this TensorRT-LLM has no "
                "ConversationParams, which came after 1.3.0rc20; leave it out, or install a later release"
            )
        if versions.health_call(llm) is None:
            logger.warning("this engine has no health call; its death shows in failing requests")

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: Any,
        *,
        hints: Hints,
        media: Sequence[MediaSpan] = (),
        routing_token_ids: Sequence[int] | None = None,
        **asked: Any,
    ) -> Result:
        if media or routing_token_ids is not None:
            raise ValueError("the request has media as spans, which the engine tensorrt-llm does not take")
        result: Result = self._llm.generate_async(inputs, sampling_params, **asked, **self._scheduling(hints))
        return result

    def generate_ready(self, prompt: ReadyPrompt, sampling_params: Any, **asked: Any) -> Result:
        result = self.generate_async(prompt.inputs, sampling_params, **asked)
        prompt.is_taken = True
        return result

    def rows_of(self, picture: npt.NDArray[np.uint8]) -> int | None:
        return multimodal.rows_of(self._llm, picture)

    def prepare_prompt(self, prompt: PicturePrompt) -> ReadyPrompt:
        return multimodal.prepare(self._llm, prompt)

    def drop_handles(self, handles: Mapping[str, Any]) -> None:
        multimodal.drop(handles)

    def drop_prompt(self, prompt: ReadyPrompt) -> None:
        multimodal.drop_prompt(prompt)

    def _scheduling(self, hints: Hints) -> dict[str, Any]:
        """Keyword arguments of ``generate_async`` for ``hints``."""
        arguments: dict[str, Any] = {}
        if hints.priority is not None and self._takes_priority:
            arguments["priority"] = hints.priority
        if self._follows_conversations:  # an explicit rank would override the conversation's rank
            if hints.conversation_id is not None:
                make = versions.conversation_params()
                arguments["conversation_params"] = make(conversation_id=hints.conversation_id)
        elif hints.dp_rank is not None and self.facts.dp_size > 1:
            make = versions.scheduling_params()
            arguments["scheduling_params"] = make(attention_dp_rank=hints.dp_rank, attention_dp_relax=False)
        return arguments

    def encode(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        return multimodal.encode(self._llm, prompt)

    def get_stats_async(self, timeout: float) -> AsyncIterator[Row | str]:
        rows: AsyncIterator[Row | str] = self._llm.get_stats_async(timeout=timeout)
        return rows

    def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Row | str]:
        rows: AsyncIterator[Row | str] = self._llm.get_kv_cache_events_async(timeout=timeout)
        return rows

    def transfer(self, output: Any) -> Transfer | None:
        """The KV transfer from a request's own timing metrics; None with ``return_perf_metrics: false``.

        TensorRT-LLM sets the start when it requests KV from a prefill engine, and the end when all KV has arrived. Both
        stay 0 if nothing was requested; TensorRT-LLM's own metrics use the same test. A failed transfer ends its
        request with an error.
        """
        if output.request_perf_metrics is None:
            return None
        timing = getattr(output.request_perf_metrics, "timing_metrics", None)
        start = getattr(timing, "kv_cache_transfer_start", None)
        end = getattr(timing, "kv_cache_transfer_end", None)
        if start is None or end is None:
            return None
        came = timedelta(0) < start < end
        size = getattr(timing, "kv_cache_size", 0)
        return Transfer(int(size), (end - start).total_seconds()) if came else Transfer(0, 0.0)

    def times(self, output: Any) -> EngineTimes | None:
        """The stages by a request's own timing metrics; None with ``return_perf_metrics: false``.

        TensorRT-LLM leaves a moment at 0 that a request did not reach.
        """
        timing = getattr(output.request_perf_metrics, "timing_metrics", None)
        names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
        moments = [getattr(timing, name, None) for name in names]
        arrived, scheduled, first, last = (None if not one else one.total_seconds() for one in moments)
        if arrived is None or scheduled is None:
            return None
        transfer = self.transfer(output)
        read_s = transfer.seconds if transfer is not None and transfer.seconds else None
        # The KV may arrive before the request is scheduled; the wait for it is then no wait in the queue.
        arrived_kv = getattr(timing, "kv_cache_transfer_end", None)
        is_early = read_s is not None and arrived_kv is not None and arrived_kv.total_seconds() <= scheduled
        read_after_s, read_before_s = (0.0, read_s or 0.0) if is_early else (read_s or 0.0, 0.0)
        computed = None if first is None else first - scheduled - read_after_s
        return EngineTimes(
            queue_s=scheduled - arrived - read_before_s,
            prefill_s=computed if read_s is None else None,
            read_s=read_s,
            first_step_s=computed if read_s is not None else None,
            decode_s=last - first if first is not None and last is not None and last > first else None,
        )

    def unread_handoffs(self, rows: Iterable[Row]) -> int:
        """The number of active and queued requests.

        TensorRT-LLM has no lease count, and keeps a request active until its KV was read.
        """
        return sum(int(row.get("numActiveRequests", 0)) + int(row.get("numQueuedRequests", 0)) for row in rows)

    def device_memory_bytes(self, rows: Iterable[Row]) -> int | None:
        return max((int(row.get("gpuMemUsage") or 0) for row in rows), default=0) or None

    def is_alive(self) -> bool:
        check = versions.health_call(self._llm)
        return check is None or bool(check())

    def cause_of_death(self) -> str:
        return str(versions.fatal_error(self._llm) or "")

    def shutdown(self) -> None:
        self._llm.shutdown()


def facts_of_llm(llm: Any, model: Path, config: Mapping[str, Any]) -> EngineFacts:
    """Facts of ``llm``, loaded for ``model`` with ``config``. Raises LaunchError if its context length is unknown."""
    capacity = versions.kv_capacity(llm)
    cache = config.get("kv_cache_config") or {}
    has_attention_dp = versions.argument(llm, "enable_attention_dp")
    return EngineFacts(
        context_length=_context_length(llm, capacity.get("maxNumTokens"), model),
        block_size=capacity.get("tokensPerBlock") or cache.get("tokens_per_block") or TOKENS_PER_BLOCK,
        num_blocks=capacity.get("maxNumBlocks"),
        max_batch_size=versions.argument(llm, "max_batch_size"),
        max_num_tokens=versions.argument(llm, "max_num_tokens"),
        dp_size=(versions.argument(llm, "tensor_parallel_size") or 1) if has_attention_dp else 1,
        guides=versions.argument(llm, "guided_decoding_backend") is not None,
        has_kv_events=not capacity or bool(capacity.get("maxNumBlocks")),  # empty: capacity unknown, so assume events
        image_token_id=multimodal.image_token_id(llm, model),
        takes_handles=multimodal.takes_handles(llm),
    )


def facts_of_encoder(encoder: Any, model: Path) -> EngineFacts:
    """Facts of an encoder, which has no KV cache: no blocks, no events."""
    return EngineFacts(
        context_length=_context_length(encoder, None, model),
        max_batch_size=versions.argument(encoder, "max_batch_size"),
        max_num_tokens=versions.argument(encoder, "max_num_tokens"),
        image_token_id=multimodal.placeholder_of(model),
    )


def _context_length(llm: Any, pool_tokens: int | None, model: Path) -> int:
    """The smallest of the limits from the arguments, the model's positions and the KV pool.

    If the config has no ``max_seq_len``, TensorRT-LLM leaves ``args.max_seq_len`` None and its ranks use the model's
    positions.
    """
    asked = versions.argument(llm, "max_seq_len") or context_length_of(read_config(model))
    context_length = min((bound for bound in (asked, pool_tokens) if bound), default=None)
    if context_length is None:
        raise LaunchError(
            f"engine tensorrt-llm reports neither max_seq_len nor a KV capacity, and {model}/config.json no "
            "max_position_embeddings; set max_seq_len in the engine config"
        )
    return context_length

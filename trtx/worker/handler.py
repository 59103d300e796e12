"""Serves one worker's requests: admits, plans, submits, streams and accounts for each of them.

Planning is in ``requests.request``, ``multimodal.expansion`` and ``requests.roles``; the rest is in
``requests.generation``, or in ``multimodal.encode_stream`` for an encode worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import partial

from dynamo._core import Context
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import is_probe
from dynamo.llm.exceptions import Disconnected

from trtx.worker.background import on_loop
from trtx.worker.metrics import RequestClock, WorkerMetrics
from trtx.worker.multimodal.audio_guard import refuse_unheard
from trtx.worker.multimodal.encode_stream import EncodeStream, encode_stream
from trtx.worker.multimodal.expansion import with_images
from trtx.worker.multimodal.media_loader import RequestMedia
from trtx.worker.multimodal.prompt_media_loader import PromptRequestMedia
from trtx.worker.parts import WorkerParts
from trtx.worker.requests import roles
from trtx.worker.requests.disconnects import ClientGone, unless_gone
from trtx.worker.requests.faults import as_dynamo_error, fault_of, is_of_closing
from trtx.worker.requests.generation import Generation
from trtx.worker.requests.grammars import check_long_grammar
from trtx.worker.requests.refusal_log import RefusalLog
from trtx.worker.requests.request import parse
from trtx.worker.requests.roles import Submission
from trtx.worker.requests.stage_clock import StageClock

logger = logging.getLogger(__name__)


class RequestHandler:
    """Serves requests until the worker stops."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._refusals = RefusalLog()
        self._namespace = os.environ.get("DYN_NAMESPACE", "")

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Returns the generator of one answer's chunks.

        May be called from any thread; the generator runs on its consumer's loop.
        """
        return self._chunks(request, context, time.monotonic_ns())

    async def _chunks(
        self, request: GenerateRequest, context: Context, asked_ns: int
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yields one answer's chunks, which come from an object with ``next``. ``asked_ns``: when the request arrived.

        That object is not a generator: Python does not close a nested generator when the outer one is closed while it
        waits.
        """
        loop, parts, outcome = asyncio.get_running_loop(), self._parts, "error"
        if parts.sleeping.is_closed and is_probe(request):
            yield {"token_ids": [], "index": 0, "finish_reason": "stop"}  # a sleeping worker is healthy
            return
        await self._admit()
        # a health probe is not a client's request and must not be counted
        metrics = WorkerMetrics() if is_probe(request) else parts.metrics
        clock, stages = RequestClock(metrics), StageClock(context.id(), asked_ns, context.trace_headers())
        release = ExitStack()
        metrics.open_requests += 1
        try:
            answer: EncodeStream | Generation
            if parts.encoder is not None:
                answer = encode_stream(parts.encoder, parts.loaded.engine, request, context)
            else:
                media = self._media(request, release)
                submission = await self._plan(request, media, context, stages)
                answer = Generation(parts, submission, media, context, clock, stages)
            release.callback(answer.close)
            while (chunk := await answer.next()) is not None:
                yield chunk
            outcome = answer.account()
        except ClientGone:
            outcome = "cancelled"
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            if is_of_closing(error):
                outcome = "cancelled"
                raise GeneratorExit from None
            outcome, translated = await self._failure(error, context)
            raise translated from error
        finally:
            metrics.outcomes[outcome] += 1
            metrics.open_requests -= 1  # after the counters: without an open request, a scrape has all of them
            on_loop(loop, partial(self._end, release, None if is_probe(request) else stages, outcome))

    def _end(self, release: ExitStack, stages: StageClock | None, outcome: str) -> None:
        """Frees what a request held, and writes its row. ``stages`` None: a health probe."""
        release.close()
        if stages is None:
            return
        row = stages.row(self._parts.options.name, self._parts.options.role, outcome)
        if self._parts.metrics.trtllm is not None:
            self._parts.metrics.trtllm.ended(row)
        if self._parts.ended is not None:
            self._parts.ended.put(row)
        if self._parts.spans is not None:
            self._parts.spans.put(row, stages.trace_headers)

    async def _admit(self) -> None:
        """Raises Disconnected if the worker sleeps, or drains and the frontends no longer route to it."""
        if self._parts.sleeping.is_closed:
            raise Disconnected(f"{self._parts.options.name} is asleep; another worker must take this request")
        if self._parts.leaving.is_draining:
            await self._parts.leaving.until_gone()
            raise Disconnected(f"{self._parts.options.name} is draining; another worker must take this request")

    def _media(self, request: GenerateRequest, release: ExitStack) -> RequestMedia | PromptRequestMedia | None:
        """The request's images, before any is fetched; ``release`` frees them. Raises InvalidRequest."""
        media_loader = self._parts.media_loader
        media = None if media_loader is None or is_probe(request) else media_loader.media_of(request)
        if media is not None:
            release.callback(media.close)
        return media

    async def _plan(
        self,
        request: GenerateRequest,
        media: RequestMedia | PromptRequestMedia | None,
        context: Context,
        stages: StageClock,
    ) -> Submission:
        """What the engine gets for ``request``. Raises InvalidRequest, ClientGone and the errors of loading images."""
        parts, loaded, role = self._parts, self._parts.loaded, self._parts.options.role
        refuse_unheard(request.get("token_ids") or (), loaded.tokenizer, self._namespace)
        parsed = parse(
            request,
            context_length=loaded.engine.facts.context_length,
            trace_headers=stages.trace_headers,
            sees=parts.media_loader is not None,
            hands_off=role == "prefill",
        )
        await check_long_grammar(parsed.grammar, loaded.api)
        if media is not None:
            handed_over, routing = roles.handed_over(role, parsed, request), request.get("mm_routing_info")
            work = with_images(parsed, media, loaded, handed_over=handed_over, routing=routing)
            began = time.monotonic()
            parsed = await unless_gone(work, context)
            stages.loaded_media(time.monotonic() - began)
        return roles.plan(role, parsed, request, loaded.api, parts.new_id)

    async def _failure(self, error: Exception, context: Context) -> tuple[str, Exception]:
        """Logs ``error``; returns the request's outcome and Dynamo's error. If the engine is dead, ends the worker."""
        leaving, loaded = self._parts.leaving, self._parts.loaded
        fault = fault_of(error, loaded.api)
        if leaving.engine_died or fault == "fatal" or not loaded.engine.is_alive():
            fault = "fatal"
            leaving.engine_is_dead(str(error), open_requests=len(self._parts.open_requests))
            await leaving.until_gone()
        translated = as_dynamo_error(error, fault, self._parts.options.role)
        if fault == "refused":
            self._refusals.tell(context.id(), str(error))
            return "invalid", translated
        logger.error("request %s: %s", context.id(), error)
        return "error", translated

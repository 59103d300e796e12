"""Serves one worker's requests.

A request is parsed (``request``), planned (``roles``), generated, converted to chunks (``chunks``) and counted
(``metrics``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from dynamo._core import Context
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import is_probe
from dynamo.llm.exceptions import Disconnected, EngineShutdown

from trtx.engine.api import Transfer
from trtx.engine.handoff_facts import HandoffFacts, outcome_of
from trtx.worker.background import on_loop
from trtx.worker.leaving import Leaving
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import RequestClock, WorkerMetrics
from trtx.worker.multimodal.audio_guard import refuse_unheard
from trtx.worker.multimodal.encode_endpoint import HEARTBEAT_SECONDS
from trtx.worker.multimodal.encode_rpc import is_refusal
from trtx.worker.multimodal.encoding import ImageEncoder
from trtx.worker.multimodal.image_encoder import PictureEncoder
from trtx.worker.multimodal.images import expand
from trtx.worker.multimodal.inputs import Looking, Sight
from trtx.worker.multimodal.prompt_inputs import PromptLooking, PromptSight
from trtx.worker.options import WorkerOptions
from trtx.worker.polling import EnginePoll
from trtx.worker.requests import handoff, roles
from trtx.worker.requests.chunks import ChunkWriter
from trtx.worker.requests.faults import EngineError, EngineSteps, as_dynamo_error, fault_of, is_of_closing
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.open_requests import OpenRequest, OpenRequests
from trtx.worker.requests.pacing import rest_seconds
from trtx.worker.requests.refusal_log import RefusalLog
from trtx.worker.requests.request import WorkerRequest, with_media, with_ready
from trtx.worker.requests.request import parse as parse_request
from trtx.worker.requests.roles import Submission
from trtx.worker.sockets import NoDelay

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class RequestHandler:
    """Serves requests with the engine in ``loaded`` until the worker stops."""

    def __init__(
        self,
        options: WorkerOptions,
        loaded: LoadedEngine,
        *,
        new_id: Callable[[], int | None],
        poll: EnginePoll,
        metrics: WorkerMetrics,
        open_requests: OpenRequests,
        leaving: Leaving,
        sight: Sight | PromptSight | None = None,
        encoder: ImageEncoder | PictureEncoder | None = None,
    ) -> None:
        """``sight`` is None for a worker that takes no images. ``encoder`` is set only for role encode."""
        self._options = options
        self._loaded = loaded
        self._sight = sight
        self._encoder = encoder
        self._new_id = new_id
        self._poll = poll
        self._metrics = metrics
        self._open = open_requests
        self._leaving = leaving
        self._refusals = RefusalLog()
        self._no_delay = NoDelay()
        self._namespace = os.environ.get("DYN_NAMESPACE", "")

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Returns the generator of one answer's chunks.

        May be called from any thread; the generator runs on its consumer's loop.
        """
        return self._chunks(request, context, time.monotonic_ns())

    async def _chunks(
        self, request: GenerateRequest, context: Context, asked_ns: int
    ) -> AsyncGenerator[GenerateChunk, None]:
        self._no_delay.cover(asked_ns)
        loaded, leaving, loop = self._loaded, self._leaving, asyncio.get_running_loop()
        if leaving.is_draining:
            await leaving.until_gone()
            raise Disconnected(f"{self._options.name} is draining; another worker must take this request")
        # a health canary is not a client's request and must not be counted
        metrics = WorkerMetrics() if is_probe(request) else self._metrics
        clock = RequestClock(metrics)
        outcome = "error"
        opened: OpenRequest | None = None
        looking: Looking | PromptLooking | None = None
        encoding: asyncio.Future[Any] | None = None
        metrics.open_requests += 1
        try:
            if self._encoder is not None and is_probe(request):
                # A health probe has no image to encode, so the answer is the engine's own health.
                alive = loaded.engine.is_alive()
                yield {"token_ids": [], "index": 0, "finish_reason": "stop" if alive else "cancelled"}
                outcome = "stop"
                return
            if self._encoder is not None:
                # Sends an empty chunk every HEARTBEAT_SECONDS until the answer is ready, so that the requester can tell
                # a busy worker from a stopped one. This loop is inline because Python does not close a nested generator
                # when the outer one is closed while it waits.
                encoding = asyncio.ensure_future(
                    self._encoder.encode(request, is_wanted=lambda: not context.is_stopped())
                )
                while not (await asyncio.wait((encoding,), timeout=HEARTBEAT_SECONDS))[0]:
                    yield {"token_ids": [], "index": 0}
                answer = encoding.result()
                yield answer
                outcome = "invalid" if is_refusal(answer.get("encoder_result") or {}) else "stop"
                return
            looking = self._sight.looking(request) if self._sight is not None and not is_probe(request) else None
            parsed = self._parse(request, context)
            if looking is not None:
                parsed = await _unless_stopped(self._with_pictures(parsed, request, looking), context)
            submission = roles.plan(self._options.role, parsed, request, loaded.api, self._new_id)
            opened = self._submit(submission)
            self._open.add(context.id(), opened)
            if submission.request.contradiction:
                # the error path aborts the request, which releases prefill's lease
                raise InvalidRequest(submission.request.contradiction)
            if context.is_stopped():
                # The client has gone. The engine must still receive the request, because only that releases prefill's
                # lease.
                opened.abort()
            elif submission.resumes and loaded.api.aborts_transfers:
                # Dynamo delays aborts until decode's first token, for engines that can't abort a KV transfer. This
                # engine can, so aborts may pass from now on.
                context.notify_first_token()
            writer = self._writer(submission)
            needs_pictures = looking is not None
            while True:
                try:
                    async for step in EngineSteps(opened.result):
                        if leaving.engine_died:
                            # the engine may still return tokens, but the answer must continue on another worker
                            raise EngineShutdown("the engine died")
                        if step.outputs[0].token_ids:
                            opened.saw_token()
                            self._poll.saw_token()
                        chunk = writer.next(step)
                        if chunk is None:
                            continue
                        if submission.hands_off:
                            handoff.add_to(chunk, step, submission.request, self._options.name)
                        if writer.finish_reason is not None:
                            self._tell_of_handoff(chunk, submission, step)
                        clock.tokens(len(chunk["token_ids"]))
                        passed_on = time.monotonic()
                        yield chunk
                        if writer.finish_reason is not None:
                            break  # the worker found a stop string, which the engine does not know about
                        rest = rest_seconds(time.monotonic() - passed_on, self._metrics.open_requests)
                        if rest and (pause := loaded.engine.pause(opened.result, rest)) is not None:
                            await pause
                except Exception as error:
                    if not isinstance(looking, Looking) or not needs_pictures or not self._lacks_media(error):
                        raise
                    # The engine has to compute the prompt itself, because the prefill worker's KV or the cached blocks
                    # are gone, and it lacks the image embeddings for that. Load the images and try again, once.
                    needs_pictures = False
                    await _unless_stopped(looking.pictures(), context)
                    submission = roles.again(submission, opened.result.outputs[0], loaded.api)
                    opened = self._submit(submission)
                    self._open.add(context.id(), opened)
                    if context.is_stopped():
                        opened.abort()
                else:
                    break
            if writer.finish_reason is None:
                yield writer.cancelled()
            outcome = writer.finish_reason or "cancelled"
            self._count_transfer(submission, opened, request, metrics)
            metrics.prompt_tokens += len(submission.request.token_ids)
            metrics.cached_tokens += writer.cached_tokens
        except _Unwanted:
            outcome = "cancelled"
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            if is_of_closing(error):
                outcome = "cancelled"
                raise GeneratorExit from None
            fault = fault_of(error, loaded.api)
            if leaving.engine_died or fault == "fatal" or not loaded.engine.is_alive():
                fault = "fatal"
                leaving.engine_is_dead(str(error), open_requests=len(self._open))
                await leaving.until_gone()
            translated = as_dynamo_error(error, fault, self._options.role)
            outcome = "invalid" if fault == "refused" else "error"
            if outcome == "invalid":
                self._refusals.tell(context.id(), str(error))
            else:
                logger.error("request %s: %s", context.id(), error)
            raise translated from error
        finally:
            metrics.open_requests -= 1
            metrics.outcomes[outcome] += 1
            if encoding is not None:
                _cancel(encoding)
            on_loop(loop, partial(self._let_go, context.id(), opened, looking))

    def _let_go(self, name: str, opened: OpenRequest | None, looking: Looking | PromptLooking | None) -> None:
        """Releases the request's engine resources and images. Runs on the worker's event loop."""
        if opened is not None:
            self._open.close(name, opened, engine_died=self._leaving.engine_died)
        if looking is not None:
            looking.close()

    def _count_transfer(
        self, submission: Submission, opened: OpenRequest, request: GenerateRequest, metrics: WorkerMetrics
    ) -> None:
        """Counts what happened to the KV of a request that has ended.

        A request that a stop string cut off is not counted: the engine reports no transfer for it.
        """
        if metrics.transfers is None or is_probe(request):
            return
        if submission.resumes:
            if opened.result.finished:
                metrics.transfers.ended(self._transfer(submission, opened.result), submission.prefill)
        elif self._options.role == "decode":
            metrics.transfers.whole += 1

    def _transfer(self, submission: Submission, result: Any) -> Transfer | None:
        """The transfer of the KV that a prefill worker had for the request; None if the engine does not report it."""
        if submission.lost_because:
            return Transfer(0, 0.0, submission.lost_because)
        return self._loaded.engine.transfer(result.outputs[0])

    def _tell_of_handoff(self, chunk: dict[str, Any], submission: Submission, result: Any) -> None:
        """Adds handoff facts to a decode worker's last chunk, if the client asked for ``engine_data``."""
        if self._options.role != "decode" or not submission.request.wants_engine_data:
            return
        facts = HandoffFacts(self._options.name, "whole")
        if submission.resumes:
            came = self._transfer(submission, result)
            facts = replace(facts, outcome=outcome_of(came), prefill=submission.prefill)
            if came is not None:
                facts = replace(facts, bytes=came.bytes, seconds=came.seconds, because=came.recomputed_because)
        chunk["engine_data"] = {**chunk.get("engine_data", {}), **facts.to_engine_data()}

    def _parse(self, wire: Mapping[str, Any], context: Context) -> WorkerRequest:
        refuse_unheard(wire.get("token_ids") or (), self._loaded.tokenizer, self._namespace)
        context_length, headers = self._loaded.engine.facts.context_length, context.trace_headers()
        sees, hands_off = self._sight is not None, self._options.role == "prefill"
        return parse_request(wire, context_length=context_length, trace_headers=headers, sees=sees, hands_off=hands_off)

    async def _with_pictures(
        self, parsed: WorkerRequest, wire: Mapping[str, Any], looking: Looking | PromptLooking
    ) -> WorkerRequest:
        """The request with its prompt expanded to one placeholder per image row.

        On decode, the expansion comes from the prefill worker's answer, if there is one, and the images are not loaded.
        """
        answer = roles.handed_over(self._options.role, parsed, wire)
        context_length = self._loaded.engine.facts.context_length
        if isinstance(looking, PromptLooking):
            if answer is None:
                ready = await looking.ready(parsed.token_ids)
                return with_ready(parsed, ready.token_ids, context_length=context_length, ready=ready)
            if (made := handoff.prompt_of(answer)) is None:
                raise InvalidRequest("prefill made no room for the request's images; both workers must run trtx")
            return with_ready(parsed, made, context_length=context_length)
        assert isinstance(self._sight, Sight)
        pictures = () if answer is None else handoff.pictures_of(answer)
        if len(pictures) != len(looking):
            if answer is not None:
                raise InvalidRequest(
                    f"prefill made room for {len(pictures)} media and the request has {len(looking)}; both workers "
                    "must run this version of trtx"
                )
            pictures = await looking.pictures()
        token_ids, media = expand(parsed.token_ids, self._sight.config, pictures, self._loaded.encode_text)
        return with_media(
            parsed,
            token_ids,
            media,
            pictures=pictures,
            context_length=context_length,
            routing=wire.get("mm_routing_info"),
        )

    def _lacks_media(self, error: Exception) -> bool:
        missing = self._loaded.api.missing_media
        return missing is not None and isinstance(error, EngineError) and bool(missing(error.error))

    def _submit(self, submission: Submission) -> OpenRequest:
        request, loaded = submission.request, self._loaded
        asked: dict[str, Any] = {
            "streaming": not submission.hands_off,
            "disaggregated_params": submission.disaggregated_params,
            "cache_salt": request.cache_salt,
            "trace_headers": request.trace_headers,
            "hints": request.hints,
        }
        if request.media:
            asked |= {"media": request.media, "routing_token_ids": request.routing_token_ids}
        try:
            sampling = loaded.api.SamplingParams(**request.sampling)
            if request.ready is not None:
                result = loaded.engine.generate_ready(request.ready, sampling, **asked)
            else:
                result = loaded.engine.generate_async(request.token_ids, sampling, **asked)
        except ValueError as error:  # the LLM API raises ValueError for arguments that it refuses
            raise InvalidRequest(str(error)) from error
        except Exception as error:
            raise EngineError(error) from error
        return OpenRequest(result, is_receiving=submission.resumes and not loaded.api.aborts_transfers)

    def _writer(self, submission: Submission) -> ChunkWriter:
        request, loaded = submission.request, self._loaded
        return ChunkWriter(
            request,
            block_size=loaded.engine.facts.block_size,
            cached_at_prefill=submission.cached_at_prefill,
            prompt_logprobs=submission.prompt_logprobs,
            stops=loaded.text_of(request),
            tokenizer=loaded.tokenizer,
            hands_off=submission.hands_off,
        )


class _Unwanted(Exception):
    """The client disconnected before the request reached the engine."""


async def _unless_stopped(work: Coroutine[Any, Any, _T], context: Context) -> _T:
    """Returns the result of ``work``. Cancels it and raises _Unwanted if the client disconnects first."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Unwanted
        return working.result()
    finally:
        _cancel(stopped)
        _cancel(working)


def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancels ``work`` without waiting for it: a generator that is being closed may not await.

    ``work`` frees what it holds.
    """
    on_loop(work.get_loop(), work.cancel)

"""Generates one answer: submits the request to the engine, streams its chunks and counts what it generated."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dynamo._core import Context
from dynamo.llm.exceptions import EngineShutdown

from trtx.engine.api import Result, Transfer
from trtx.engine.handoff_facts import HandoffFacts, outcome_of
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import RequestClock
from trtx.worker.multimodal.media_loader import RequestMedia
from trtx.worker.multimodal.prompt_media_loader import PromptRequestMedia
from trtx.worker.parts import WorkerParts
from trtx.worker.requests import handoff, roles
from trtx.worker.requests.chunks import Chunk, ChunkWriter, without_end
from trtx.worker.requests.disconnects import unless_gone
from trtx.worker.requests.faults import EngineError, EngineSteps
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.open_requests import OpenRequest
from trtx.worker.requests.pacing import rest_seconds
from trtx.worker.requests.request import WorkerRequest
from trtx.worker.requests.roles import Submission
from trtx.worker.requests.stage_clock import StageClock


class Generation:
    """Generates the chunks of one request. The request is in the engine from construction until :meth:`close`."""

    def __init__(
        self,
        parts: WorkerParts,
        submission: Submission,
        media: RequestMedia | PromptRequestMedia | None,
        context: Context,
        clock: RequestClock,
        stages: StageClock,
    ) -> None:
        """Submits the request. ``media``: the request's images, which the engine may need again while it generates.

        Raises InvalidRequest, or EngineError if the engine raises an error. The request is submitted even if its fields
        contradict each other, because only the engine can release the prefill worker's lease.
        """
        self._parts, self._submission, self._context, self._clock = parts, submission, context, clock
        self._stages = stages
        self._images = media if isinstance(media, RequestMedia) else None  # None: the images can't be loaded again
        self._passed_on = 0.0  # when the last chunk was returned
        self._end: Chunk | None = None  # the chunk after the last one with tokens, if it is one of its own
        self._submit()
        if clock.metrics.trtllm is not None:
            request = submission.request
            has_images = bool(request.media) or request.ready is not None
            clock.metrics.trtllm.began(has_images=has_images, has_grammar=request.grammar is not None)
        try:
            self._writer = self._begin()
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        # Recorded before the call, because the engine may begin within it; otherwise that time would count twice.
        self._stages.submitted(len(self._submission.request.token_ids))
        self._opened = submit(self._submission, self._parts.loaded)
        self._steps = EngineSteps(self._opened.result)
        self._parts.open_requests.add(self._context.id(), self._opened)
        if self._context.is_stopped():
            self._opened.abort()

    def _begin(self) -> ChunkWriter:
        submission, loaded = self._submission, self._parts.loaded
        if submission.request.contradiction:
            raise InvalidRequest(submission.request.contradiction)
        if submission.resumes and loaded.api.aborts_transfers and not self._context.is_stopped():
            # Dynamo holds aborts back until decode's first token, because some engines can't abort a KV transfer. This
            # engine can, so tell Dynamo to pass aborts on from now on.
            self._context.notify_first_token()
        return ChunkWriter(
            submission.request,
            block_size=loaded.engine.facts.block_size,
            cached_at_prefill=submission.cached_at_prefill,
            prompt_logprobs=submission.prompt_logprobs,
            stops=loaded.text_of(submission.request),
            tokenizer=loaded.tokenizer,
        )

    async def next(self) -> Chunk | None:
        """The next chunk; None after the last one."""
        if self._end is not None:
            end, self._end = self._end, None
            return end
        if self._writer.finish_reason is not None:
            return None  # the answer may have ended at a stop string, which only the worker sees, not the engine
        if self._passed_on:
            passed = time.monotonic() - self._passed_on
            rest = rest_seconds(passed, self._parts.metrics.open_requests)
            self._stages.held(passed, rest)
            if rest and (pause := self._parts.loaded.engine.pause(self._opened.result, rest)) is not None:
                await pause
        while True:
            try:
                async for step in self._steps:
                    if (chunk := self._chunk(step)) is not None:
                        self._clock.tokens(len(chunk["token_ids"]))
                        self._passed_on = time.monotonic()
                        self._stages.passed_on(self._passed_on, len(chunk["token_ids"]))
                        return chunk
            except Exception as error:
                if self._images is None or not self._lacks_media(error):
                    raise
                await self._submit_with_images(self._images)
            else:
                return self._writer.cancelled()

    def _chunk(self, step: Any) -> Chunk | None:
        """The chunk for one engine step; None if the step added nothing that can be sent yet."""
        parts, submission, writer = self._parts, self._submission, self._writer
        if parts.leaving.engine_died:
            # the engine may still return tokens, but the answer must continue on another worker
            raise EngineShutdown("the engine died")
        if step.outputs[0].token_ids:
            self._opened.saw_token()
            parts.poll.saw_token()
        chunk = writer.next(step)
        if chunk is None:
            return None
        if submission.hands_off:
            handoff.add_to(chunk, step, submission.request, parts.options.name)
        if writer.finish_reason is not None and parts.options.role == "decode" and submission.request.wants_engine_data:
            chunk["engine_data"] = {**chunk.get("engine_data", {}), **self._handoff_facts(step).to_engine_data()}
        if writer.finish_reason is not None and "log_probs" in chunk and self._may_be_call:
            chunk, self._end = without_end(chunk)
        return chunk

    @property
    def _may_be_call(self) -> bool:
        """Whether the frontend may make a forced tool call of the answer: it sends the worker a grammar then."""
        return self._submission.request.grammar is not None and not self._submission.hands_off

    def _lacks_media(self, error: Exception) -> bool:
        missing = self._parts.loaded.api.missing_media
        return missing is not None and isinstance(error, EngineError) and bool(missing(error.error))

    async def _submit_with_images(self, images: RequestMedia) -> None:
        """Loads the images and submits the request again, at most once per request.

        The engine needs the images if the prefill worker's KV or the cached blocks are gone, because it then has to
        compute the prompt itself.
        """
        self._images = None
        began = time.monotonic()
        await unless_gone(images.pictures(), self._context)
        self._stages.loaded_media(time.monotonic() - began)
        seen = self._opened.result.outputs[0]
        self._submission = roles.again(self._submission, seen, self._parts.loaded.api)
        self._submit()

    def account(self) -> str:
        """Adds the request's tokens and KV transfer to the metrics, and returns its outcome.

        The KV transfer of a request that ended at a stop string is not counted, because the engine doesn't report it.
        """
        metrics, submission = self._clock.metrics, self._submission
        metrics.prompt_tokens += len(submission.request.token_ids)
        metrics.cached_tokens += self._writer.cached_tokens
        self._stages.cached_tokens = self._writer.cached_tokens
        if metrics.transfers is not None:
            if submission.resumes:
                if self._opened.result.finished:
                    transfer = self._transfer(self._opened.result)
                    metrics.transfers.ended(transfer, submission.prefill)
                    if transfer is not None and metrics.trtllm is not None:
                        metrics.trtllm.transferred(transfer)
            elif submission.is_local:
                metrics.transfers.local += 1
            elif self._parts.options.role == "decode":
                metrics.transfers.whole += 1
        return self._writer.finish_reason or "cancelled"

    def _transfer(self, result: Any) -> Transfer | None:
        """The transfer of the request's KV from the prefill worker; None if the engine doesn't report it."""
        if self._submission.lost_because:
            return Transfer(0, 0.0, self._submission.lost_because)
        return self._parts.loaded.engine.transfer(result.outputs[0])

    def _handoff_facts(self, result: Any) -> HandoffFacts:
        facts = HandoffFacts(self._parts.options.name, "local" if self._submission.is_local else "whole")
        if not self._submission.resumes:
            return facts
        came = self._transfer(result)
        facts = replace(facts, outcome=outcome_of(came), prefill=self._submission.prefill)
        if came is None:
            return facts
        return replace(facts, bytes=came.bytes, seconds=came.seconds, because=came.recomputed_because)

    def close(self) -> None:
        """Aborts the request in the engine if it still runs there. Runs on the worker's event loop."""
        parts = self._parts
        if outputs := self._opened.result.outputs:
            self._stages.engine = parts.loaded.engine.times(outputs[0])
        parts.open_requests.close(self._context.id(), self._opened, engine_died=parts.leaving.engine_died)


def _guided(request: WorkerRequest, loaded: LoadedEngine) -> dict[str, Any]:
    """The grammar as keyword argument of SamplingParams. Raises InvalidRequest if the engine follows none."""
    grammar, api = request.grammar, loaded.api
    if grammar is None:
        return {}
    if api.GuidedDecodingParams is None:
        raise InvalidRequest(
            f"guided decoding ({grammar.kind}) is not served by engine {api.kind}, which makes no text of its own; "
            "drop response_format, guided_* and a forced tool_choice"
        )
    if not loaded.engine.facts.guides:
        raise InvalidRequest(
            f"guided decoding ({grammar.kind}) is turned off on this worker; drop response_format, guided_* and a "
            "forced tool_choice, or set guided_decoding_backend in the engine config"
        )
    limits = {} if loaded.thinking is None else loaded.thinking.limits(request.token_ids)
    return {"guided_decoding": api.GuidedDecodingParams(**grammar.params, **limits)}


def _processed(request: WorkerRequest, loaded: LoadedEngine) -> dict[str, Any]:
    """The logits processors as keyword argument of SamplingParams.

    Only ``dynamo_test_hook`` can set one, because no request can name any.
    """
    if loaded.forced_text is None:
        return {}
    return {"logits_processor": [loaded.forced_text.after(len(request.token_ids))]}


def submit(submission: Submission, loaded: LoadedEngine) -> OpenRequest:
    """Submits a request. Raises InvalidRequest if the engine refuses its arguments, EngineError for any other error."""
    request = submission.request
    arguments: dict[str, Any] = {
        "streaming": not submission.hands_off,
        "disaggregated_params": submission.disaggregated_params,
        "cache_salt": request.cache_salt,
        "trace_headers": request.trace_headers,
        "hints": request.hints,
    }
    if request.media:
        arguments |= {"media": request.media, "routing_token_ids": request.routing_token_ids}
    result: Result
    try:
        sampling = loaded.api.SamplingParams(
            **request.sampling, **_guided(request, loaded), **_processed(request, loaded)
        )
        if request.ready is not None:
            result = loaded.engine.generate_ready(request.ready, sampling, **arguments)
        else:
            result = loaded.engine.generate_async(request.token_ids, sampling, **arguments)
    except ValueError as error:  # the LLM API raises ValueError for arguments that it refuses
        raise InvalidRequest(str(error)) from error
    except Exception as error:
        raise EngineError(error) from error
    return OpenRequest(result, is_receiving=submission.resumes and not loaded.api.aborts_transfers)

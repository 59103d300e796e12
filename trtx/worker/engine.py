"""``TrtxEngine``: Dynamo's ``LLMEngine`` over any engine with the LLM API.

A request's way: parse (``request``), plan (``roles``), generate, account (``chunks``, ``metrics``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm.exceptions import Disconnected, InvalidArgument
from prometheus_client import CollectorRegistry

from trtx.worker import handoff, loading, roles
from trtx.worker.chunks import ChunkWriter
from trtx.worker.faults import as_dynamo_error
from trtx.worker.handoff import RequestIds, UnreadLeases
from trtx.worker.kv_events import DP_RANK, EnginePoll
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import RequestClock, WorkerMetrics
from trtx.worker.options import WorkerOptions, parse
from trtx.worker.request import InvalidRequest
from trtx.worker.request import parse as parse_request
from trtx.worker.roles import Submission
from trtx.worker.sockets import set_nodelay_everywhere
from trtx.worker.status import StatusFile

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.25
"""How late the death of the engine is noticed."""
DRAIN_POLL_SECONDS = 0.02
GONE_SECONDS = 0.3
"""How long frontends take to notice that a worker has left, generously: 0.12 s was seen with file discovery."""
_MODES = {
    "agg": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
    "encode": DisaggregationMode.ENCODE,
}


class TrtxEngine(LLMEngine):  # type: ignore[misc, unused-ignore] # dynamo ships no types for it
    """One worker's engine, driven by Dynamo's ``Worker``.

    ``engine_died`` and ``start_error`` tell the process how to exit; ``on_engine_death`` is called at once.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.engine_died = False
        self.start_error: str | None = None
        self.on_engine_death: Callable[[], None] = lambda: None
        self.status = StatusFile(options.status_file)
        self._metrics = WorkerMetrics()
        self._open: dict[str, Any] = {}  # context id -> the engine's result, for abort and drain
        self._loaded: LoadedEngine | None = None
        self._ids = RequestIds(0)
        self._poll: EnginePoll | None = None
        self._health: asyncio.Task[None] | None = None
        self._draining = False
        self._unread = UnreadLeases()
        self._deregistered = asyncio.Event()

    # --- life ---

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[TrtxEngine, WorkerConfig]:
        engine = cls(parse(list(argv or ())))
        return engine, engine.worker_config()

    def worker_config(self) -> WorkerConfig:
        """Where this worker registers. Addresses and planes come from the environment that the topology plans."""
        options = self.options
        return WorkerConfig(
            namespace=get_worker_namespace(),
            component="prefill" if options.role == "prefill" else "backend",
            endpoint="generate",
            model_name=str(options.model),
            served_model_name=options.served_model_name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
            disaggregation_mode=_MODES[options.role],
        )

    async def start(self, worker_id: int) -> EngineConfig:
        self.status.update(worker_id=worker_id)
        try:
            loaded = await asyncio.to_thread(loading.load, self.options)
        except Exception as error:
            self.start_error = str(error) or type(error).__name__
            self.status.update(error=self.start_error)
            raise
        self._loaded = loaded
        self._ids = RequestIds(worker_id)
        self._metrics.handoff = loaded.handoff_stats
        if loaded.num_blocks:  # what is known before the first step
            self._metrics.iteration = {"kvCacheStats": {"maxNumBlocks": loaded.num_blocks, "usedNumBlocks": 0}}
        self._poll = EnginePoll(loaded.llm, on_stats=self._on_stats)
        self._poll.start()
        self._health = asyncio.create_task(self._watch_engine(loaded))
        self.status.update(
            state="serving",
            engine_pid=loaded.engine_pid,
            device_memory_bytes=loaded.device_memory_bytes(),
            kv_blocks=loaded.num_blocks or 0,
        )
        logger.info("%s serves %s, context %d", self.options.name, self.options.model, loaded.context_length)
        return EngineConfig(
            model=str(self.options.model),
            served_model_name=self.options.served_model_name,
            llm=LlmRegistration(
                context_length=loaded.context_length,
                kv_cache_block_size=loaded.block_size,
                total_kv_blocks=loaded.num_blocks,
                max_num_seqs=loaded.max_batch_size,
                max_num_batched_tokens=loaded.max_num_tokens,
                data_parallel_size=1,
            ),
        )

    async def is_quiescent(self) -> bool | None:
        """True when nothing runs and no decode worker is about to read KV from here.

        Dynamo asks a prefill worker alone, once it was told to stop, until its drain budget is spent.
        """
        if self.status.status.state == "serving":
            self.status.update(state="draining")
        if self._open:
            self._unread.requests_are_open()
            return False
        if self._loaded is None or self.engine_died:
            return True
        totals = self._loaded.handoff_stats()
        return totals is None or not self._unread.are_wanted(totals.leases)

    async def cleanup(self) -> None:
        """Waits for what has begun, within bounds, then ends the engine. Safe after a failed ``start``, and twice."""
        self._draining = True
        self._deregistered.set()  # Dynamo's Worker does that first
        loaded = self._loaded
        if loaded is None:
            return
        self.status.update(state="draining")
        # A prefill worker is drained by now: Dynamo asked is_quiescent until its budget, which is ours, was spent.
        is_short = self.engine_died or self.options.role == "prefill"
        await self._drain(4 * GONE_SECONDS if is_short else self.options.drain_seconds)
        if not self.engine_died and (totals := loaded.handoff_stats()) is not None and totals.leases:
            logger.warning("%s: %d leases end unread; who still wants them computes", self.options.name, totals.leases)
        if self._health is not None:
            self._health.cancel()
        if self._poll is not None:
            await asyncio.to_thread(self._poll.stop)
        self._loaded = None
        if not await asyncio.to_thread(loaded.shutdown):
            logger.error("%s: the engine did not end in %g s", self.options.name, loading.SHUTDOWN_SECONDS)

    async def _drain(self, seconds: float) -> None:
        """Dynamo 1.4.2 calls ``cleanup`` while requests still run; ending the engine now would cut them off."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.is_quiescent():
            if asyncio.get_running_loop().time() > deadline:
                logger.warning(
                    "%s: %d requests cut off after %g s of draining", self.options.name, len(self._open), seconds
                )
                for result in list(self._open.values()):
                    result.abort()
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _watch_engine(self, loaded: LoadedEngine) -> None:
        while loaded.is_alive():
            await asyncio.sleep(HEALTH_SECONDS)
            if (memory := loaded.device_memory_bytes()) != self.status.status.device_memory_bytes:
                self.status.update(device_memory_bytes=memory)
        self._leave()

    def _leave(self) -> None:
        """A dead engine ends its worker: the launcher restarts both, and Dynamo moves the requests elsewhere."""
        if self.engine_died:
            return
        self.engine_died = True
        self.on_engine_death()
        self.status.update(error="the engine died")
        logger.error("%s: the engine died; this worker ends, %d requests were open", self.options.name, len(self._open))
        # The runtime's own way out takes the discovery records along, so that nothing is routed here any more.
        os.kill(os.getpid(), signal.SIGTERM)

    # --- requests ---

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        set_nodelay_everywhere()
        loaded = self._loaded
        if loaded is None or self._draining:
            await self._wait_until_gone()
            raise Disconnected(f"{self.options.name} is draining; another worker must take this request")
        metrics = WorkerMetrics() if is_probe(request) else self._metrics  # a canary is no client's request
        clock = RequestClock(metrics)
        outcome = "error"
        result = None
        metrics.open_requests += 1
        try:
            submission = self._plan(request, context, loaded)
            result = self._submit(submission, loaded)
            self._open[context.id()] = result
            if context.is_stopped():
                # Nobody waits for it. The engine has to see it all the same: that is what releases prefill's lease.
                result.abort()
            elif submission.resumes and loaded.api.kind != "tensorrt-llm":
                # Dynamo holds an abort back until decode's first token, for engines that can't abort a KV transfer.
                context.notify_first_token()
            writer = ChunkWriter(
                submission.request, block_size=loaded.block_size, cached_at_prefill=submission.cached_at_prefill
            )
            async for step in result:
                chunk = writer.next(step)
                if chunk is None:
                    continue
                if submission.hands_off:
                    _hand_off(chunk, step, len(submission.request.token_ids))
                clock.tokens(len(chunk["token_ids"]))
                yield chunk
            if writer.finish_reason is None:
                yield writer.cancelled()
            outcome = writer.finish_reason or "cancelled"
            metrics.prompt_tokens += len(submission.request.token_ids)
            metrics.cached_tokens += writer.cached_tokens
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            engine_is_dead = not loaded.is_alive()
            if engine_is_dead:
                self._leave()
                await self._wait_until_gone()
            translated = as_dynamo_error(error, loaded.api.RequestError, engine_is_dead=engine_is_dead)
            outcome = "invalid" if isinstance(translated, InvalidArgument) else "error"
            logger.log(logging.INFO if outcome == "invalid" else logging.ERROR, "request %s: %s", context.id(), error)
            raise translated from error
        finally:
            metrics.open_requests -= 1
            metrics.outcomes[outcome] += 1
            if result is not None:
                self._open.pop(context.id(), None)
                if not result.finished:
                    result.abort()

    async def _wait_until_gone(self) -> None:
        """Dynamo moves a request on at once, up to its migration limit: a worker that is still in its routing table
        would get it back and use the limit up (seen with the KV router of 1.4.2)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deregistered.wait(), GONE_SECONDS)
        await asyncio.sleep(GONE_SECONDS)

    def _plan(self, request: Mapping[str, Any], context: Context, loaded: LoadedEngine) -> Submission:
        parsed = parse_request(request, context_length=loaded.context_length, trace_headers=context.trace_headers())
        return roles.plan(self.options.role, parsed, request, loaded.api, self._ids)

    def _submit(self, submission: Submission, loaded: LoadedEngine) -> Any:
        request = submission.request
        try:
            return loaded.llm.generate_async(
                request.token_ids,
                loaded.api.SamplingParams(**request.sampling),
                streaming=not submission.hands_off,
                disaggregated_params=submission.disaggregated_params,
                cache_salt=request.cache_salt,
                trace_headers=request.trace_headers,
            )
        except ValueError as error:  # how the LLM API refuses an argument
            raise InvalidRequest(str(error)) from error

    async def abort(self, context: Context) -> None:
        result = self._open.get(context.id())
        if result is not None:
            result.abort()

    # --- what Dynamo observes ---

    async def register_prometheus(self, metrics: Any) -> None:
        registry = CollectorRegistry()
        registry.register(self._metrics)
        register_engine_registry(metrics, registry)

    async def kv_event_sources(self) -> list[KvEventSource]:
        loaded, poll = self._loaded, self._poll
        if loaded is None or poll is None or not loaded.publishes_kv_events or loaded.block_size is None:
            return []
        block_size = loaded.block_size
        return [PushSource(on_ready=lambda publisher: poll.publish_events(publisher, block_size), dp_rank=DP_RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [DP_RANK] if self._loaded is not None and self._loaded.num_blocks else []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        if self._poll is not None:
            self._poll.publish_load(publisher)

    async def health_check_payload(self) -> dict[str, Any] | None:
        if self._loaded is None:
            return None
        payload: dict[str, Any] = build_health_check_payload(loading.probe_token_id(self.options.model))
        return payload

    def _on_stats(self, row: Mapping[str, Any]) -> None:
        """Called from the poll's thread; the assignment is atomic."""
        self._metrics.iteration = row


def _hand_off(chunk: dict[str, Any], result: Any, prompt_tokens: int) -> None:
    """Makes prefill's terminal chunk one that the frontend passes on to decode.

    "length" with params means: go on at decode. "stop" means that the first token ended the request: the frontend
    then answers with this chunk and skips decode.
    """
    if chunk.get("finish_reason") == "length":
        chunk["disaggregated_params"] = handoff.to_json(
            result.outputs[0].disaggregated_params, prompt_tokens=prompt_tokens
        )

"""``TrtxEngine``: Dynamo's ``LLMEngine`` over any engine with the LLM API.

A request's way: parse (``request``), plan (``roles``), generate, account (``chunks``, ``metrics``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm.exceptions import Disconnected, EngineShutdown, InvalidArgument
from prometheus_client import CollectorRegistry

from trtx.engine.ranks import descendants
from trtx.engine.tensorrt_llm import versions
from trtx.worker import handoff, loading, roles, watch
from trtx.worker.chunks import ChunkWriter
from trtx.worker.faults import as_dynamo_error, is_fatal
from trtx.worker.handoff import RequestIds, UnreadLeases
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import RequestClock, WorkerMetrics, absent_fields
from trtx.worker.open_requests import OpenRequest
from trtx.worker.options import WorkerOptions, parse
from trtx.worker.polling import EnginePoll
from trtx.worker.request import InvalidRequest
from trtx.worker.request import parse as parse_request
from trtx.worker.roles import Submission
from trtx.worker.sockets import set_nodelay_everywhere
from trtx.worker.status import StatusFile

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
GONE_SECONDS = 0.3
"""How long frontends take to notice that a worker has left, generously: 0.12 s was seen with file discovery."""


class TrtxEngine(LLMEngine):  # type: ignore[misc, unused-ignore] # dynamo ships no types for it
    """One worker's engine, driven by Dynamo's ``Worker``.

    ``engine_died``, ``engine_hangs`` and ``start_error`` tell the process how to exit; ``on_engine_death`` is called at
    once.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.engine_died = False
        self.engine_hangs = False  # its shutdown did not return in time
        self.start_error: str | None = None
        self.on_engine_death: Callable[[], None] = lambda: None
        self.status = StatusFile(options.status_file)
        self._metrics = WorkerMetrics()
        self._open: dict[str, OpenRequest] = {}  # by context id, for abort and drain
        self._loaded: LoadedEngine | None = None
        self._encoder: Any = None  # ImageEncoder, in the encode role
        self._new_id: Callable[[], int | None] = RequestIds(0).next
        self._poll: EnginePoll | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._knows_stats = False
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
            component=options.role if options.role in ("prefill", "encode") else "backend",
            endpoint="generate",
            model_name=str(options.model),
            served_model_name=options.served_model_name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
            disaggregation_mode=DisaggregationMode(options.role),
        )

    async def start(self, worker_id: int) -> EngineConfig:
        self.status.update(worker_id=worker_id)
        self._begin(watch.watch_ranks(self.status))
        try:
            loaded = await asyncio.to_thread(loading.load, self.options)
        except Exception as error:
            self.start_error = str(error) or type(error).__name__
            self.status.update(error=self.start_error)
            raise
        self._loaded = loaded
        if self.options.role == "encode":
            from trtx.worker.encoding import ImageEncoder

            self._encoder = ImageEncoder(loaded.llm)
        make_ids = loaded.api.new_request_ids
        self._new_id = RequestIds(worker_id).next if make_ids is None else make_ids(worker_id)
        self._poll = poll = EnginePoll(loaded.llm, on_stats=self._on_stats)
        self._metrics.handoff = loaded.handoff_stats
        self._metrics.lost_kv_events = lambda: poll.lost_events
        self._metrics.iterations[0] = {  # what is known before the first step
            "numActiveRequests": 0,
            "numQueuedRequests": 0,
            "kvCacheStats": {"maxNumBlocks": loaded.num_blocks, "usedNumBlocks": 0} if loaded.num_blocks else {},
        }
        if self._encoder is None:
            poll.start()
        if versions.health_call(loaded.llm) is None:
            logger.warning("%s: this engine has no health call; its death shows in failing requests", self.options.name)
        self._begin(self._leave_when_dead(loaded))
        self.status.update(
            state="serving",
            engine_pid=loaded.engine_pid,
            device_memory_bytes=watch.device_memory_bytes(loaded, self._metrics),
            kv_blocks=loaded.num_blocks or 0,
            load_seconds=round(loaded.load_seconds, 3),
            ranks=descendants(os.getpid()),
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
                data_parallel_size=loaded.dp_size,
            ),
        )

    async def is_quiescent(self) -> bool | None:
        """True when nothing runs and no decode worker is about to read KV from here.

        Dynamo asks a prefill worker alone, once it was told to stop, until its drain budget is spent.
        """
        if self.status.status.state == "serving":
            self.status.update(state="draining")
        if self._open or self._metrics.open_requests:
            self._unread.requests_are_open()
            return False
        if self._loaded is None or self.engine_died:
            return True
        return not self._unread.are_wanted(self._handoffs(self._loaded))

    def _handoffs(self, loaded: LoadedEngine) -> int:
        """Requests whose KV a decode worker may still read from here. TensorRT-LLM counts them as active ones."""
        if (totals := loaded.handoff_stats()) is not None:
            return totals.leases
        rows = self._metrics.iterations.values() if self.options.role == "prefill" else ()
        return sum(int(row.get("numActiveRequests", 0)) + int(row.get("numQueuedRequests", 0)) for row in rows)

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
        if not self.engine_died and (unread := self._handoffs(loaded)):
            logger.warning("%s: %d leases end unread; who still wants them computes", self.options.name, unread)
        for task in tuple(self._tasks):
            task.cancel()
        if self._poll is not None:
            await asyncio.to_thread(self._poll.stop)
        self._loaded = None
        if not await asyncio.to_thread(loaded.shutdown):
            self.engine_hangs = True
            logger.error("%s: the engine did not end in %g s", self.options.name, loaded.shutdown_seconds)

    async def _drain(self, seconds: float) -> None:
        """Dynamo 1.4.2 calls ``cleanup`` while requests still run; ending the engine now would cut them off."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.is_quiescent():
            if asyncio.get_running_loop().time() > deadline:
                logger.warning(
                    "%s: %d requests cut off after %g s of draining", self.options.name, len(self._open), seconds
                )
                for opened in list(self._open.values()):
                    opened.abort()
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave_when_dead(self, loaded: LoadedEngine) -> None:
        stall_seconds = self.options.stall_seconds
        self._leave(await watch.until_death(loaded, self.status, self._metrics, stall_seconds=stall_seconds))

    def _leave(self, reason: str) -> None:
        """A dead engine ends its worker: the launcher restarts both, and Dynamo moves the requests elsewhere."""
        if self.engine_died:
            return
        self.engine_died = True
        self.on_engine_death()
        told = f"the engine died{': ' if reason else ''}{reason}"
        self.status.update(error=told)
        logger.error("%s: %s; this worker ends, %d requests were open", self.options.name, told, len(self._open))
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
        opened: OpenRequest | None = None
        metrics.open_requests += 1
        try:
            if self._encoder is not None:
                yield await self._encode(request, loaded)
                outcome = "stop"
                return
            submission = self._plan(request, context, loaded)
            opened = self._submit(submission, loaded)
            self._open[context.id()] = opened
            if context.is_stopped():
                # Nobody waits for it. The engine has to see it all the same: that is what releases prefill's lease.
                opened.abort()
            elif submission.resumes and loaded.api.aborts_transfers:
                # Dynamo holds an abort back until decode's first token, for engines that can't abort a KV transfer.
                context.notify_first_token()
            writer = self._writer(submission, loaded)
            async for step in opened.result:
                if self.engine_died:
                    raise EngineShutdown("the engine died")  # it may still give tokens; another worker goes on
                if step.outputs[0].token_ids:
                    self._saw_token(opened)
                chunk = writer.next(step)
                if chunk is None:
                    continue
                if submission.hands_off:
                    handoff.add_to(chunk, step, prompt_tokens=len(submission.request.token_ids))
                clock.tokens(len(chunk["token_ids"]))
                yield chunk
                if writer.finish_reason is not None:
                    break  # a stop string: the engine does not know of it
            if writer.finish_reason is None:
                yield writer.cancelled()
            outcome = writer.finish_reason or "cancelled"
            metrics.prompt_tokens += len(submission.request.token_ids)
            metrics.cached_tokens += writer.cached_tokens
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            engine_is_dead = self.engine_died or is_fatal(error, loaded.api) or not loaded.is_alive()
            if engine_is_dead:
                self._leave(str(error))
                await self._wait_until_gone()
            translated = as_dynamo_error(error, loaded.api, engine_is_dead=engine_is_dead)
            outcome = "invalid" if isinstance(translated, InvalidArgument) else "error"
            logger.log(logging.INFO if outcome == "invalid" else logging.ERROR, "request %s: %s", context.id(), error)
            raise translated from error
        finally:
            metrics.open_requests -= 1
            metrics.outcomes[outcome] += 1
            if opened is not None:
                self._close(context.id(), opened)

    async def _encode(self, request: Mapping[str, Any], loaded: LoadedEngine) -> dict[str, Any]:
        if is_probe(request):  # one prompt without images: there is nothing to encode, and health is asked as always
            return {"token_ids": [], "index": 0, "finish_reason": "stop" if loaded.is_alive() else "cancelled"}
        chunk: dict[str, Any] = await self._encoder.encode(request)
        return chunk

    def _saw_token(self, opened: OpenRequest) -> None:
        opened.saw_token()
        if self._poll is not None:
            self._poll.saw_token()

    def _close(self, name: str, opened: OpenRequest) -> None:
        """Takes a request that ended, or that nobody reads any more, off the books and out of the engine."""
        if not opened.result.finished and not self.engine_died:
            opened.abort()
            if opened.is_receiving:
                self._begin(self._see_out(name, opened))
                return
        self._open.pop(name, None)

    async def _see_out(self, name: str, opened: OpenRequest) -> None:
        await opened.see_out()
        self._open.pop(name, None)

    async def _wait_until_gone(self) -> None:
        """Dynamo moves a request on at once, up to its migration limit: a worker that is still in its routing table
        would get it back and use the limit up (seen with the KV router of 1.4.2)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deregistered.wait(), GONE_SECONDS)
        await asyncio.sleep(GONE_SECONDS)

    def _plan(self, request: Mapping[str, Any], context: Context, loaded: LoadedEngine) -> Submission:
        parsed = parse_request(request, context_length=loaded.context_length, trace_headers=context.trace_headers())
        return roles.plan(self.options.role, parsed, request, loaded.api, self._new_id)

    def _submit(self, submission: Submission, loaded: LoadedEngine) -> OpenRequest:
        request = submission.request
        try:
            result = loaded.llm.generate_async(
                request.token_ids,
                loaded.api.SamplingParams(**request.sampling),
                streaming=not submission.hands_off,
                disaggregated_params=submission.disaggregated_params,
                cache_salt=request.cache_salt,
                trace_headers=request.trace_headers,
                **loaded.scheduling(request),
            )
        except ValueError as error:  # how the LLM API refuses an argument
            raise InvalidRequest(str(error)) from error
        return OpenRequest(result, is_receiving=submission.resumes and not loaded.api.aborts_transfers)

    def _writer(self, submission: Submission, loaded: LoadedEngine) -> ChunkWriter:
        request = submission.request
        return ChunkWriter(
            request,
            block_size=loaded.block_size,
            cached_at_prefill=submission.cached_at_prefill,
            stops=loaded.stop_strings(request) if request.stop_strings else None,
            tokenizer=loaded.tokenizer,
        )

    async def abort(self, context: Context) -> None:
        opened = self._open.get(context.id())
        if opened is not None:
            opened.abort()

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
        return [
            PushSource(
                on_ready=lambda publisher, rank=rank: poll.publish_events(publisher, block_size, rank),
                dp_rank=rank,
            )
            for rank in range(loaded.dp_size)
        ]

    def component_metrics_dp_ranks(self) -> list[int]:
        loaded = self._loaded
        return list(range(loaded.dp_size)) if loaded is not None and loaded.num_blocks else []

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
        if not self._knows_stats:
            self._knows_stats = True
            if absent := absent_fields(row):
                logger.info("this engine's iteration stats lack %s; their metrics stay away", ", ".join(absent))
        self._metrics.iterations[row.get("attentionDpRank") or 0] = row

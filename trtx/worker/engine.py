"""``TrtxEngine``: Dynamo's ``LLMEngine`` on top of any engine with the LLM API, from start to shutdown.

``handler`` serves the requests; ``leaving`` decides how long a stopping worker waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm import unregister_model
from prometheus_client import CollectorRegistry

from trtx.engine.ranks import descendants
from trtx.engine.worker_status import requests_file
from trtx.garbage import nothing_of_it_is_garbage
from trtx.worker import loading, watch
from trtx.worker.background import Background
from trtx.worker.forward_pass import ForwardPassPublication, wants_forward_passes
from trtx.worker.handler import RequestHandler
from trtx.worker.leaving import GONE_SECONDS, Leaving, UnreadHandoffs
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import WorkerMetrics, absent_fields
from trtx.worker.multimodal.audio_guard import registered_template
from trtx.worker.multimodal.setup import MultimodalSetup
from trtx.worker.options import WorkerOptions, parse
from trtx.worker.parts import WorkerParts
from trtx.worker.polling import EnginePoll
from trtx.worker.requests.open_requests import OpenRequests
from trtx.worker.requests.span_export import ENABLED, ENDPOINT, SERVICE, SpanExport
from trtx.worker.requests.stage_log import StageLog
from trtx.worker.sleeping import CONTROLS, Sleeping
from trtx.worker.status import StatusFile
from trtx.worker.transfers import TransferCounts
from trtx.worker.trtllm_metrics import TrtllmMetrics

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
STATS_CONTROL = "iteration_stats"
MOST_ROWS = 1000
"""Rows of iteration stats that are kept for a reader; as many as TensorRT-LLM keeps."""


class TrtxEngine(LLMEngine):  # type: ignore[misc, unused-ignore] # dynamo ships no types for it
    """One worker's engine, driven by Dynamo's ``Worker``.

    The process derives its exit code from ``leaving.engine_died``, ``engine_hangs`` and ``start_error``.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.engine_hangs = False  # the engine's shutdown() did not return in time
        self.start_error: str | None = None
        self.status = StatusFile(options.status_file)
        self.leaving = Leaving(options.name, self.status)
        self._background = Background()
        self._metrics = WorkerMetrics()
        self._open = OpenRequests(self._background)
        self._unread = UnreadHandoffs()
        self._loaded: LoadedEngine | None = None
        self._multimodal: MultimodalSetup | None = None
        self._handler: RequestHandler | None = None
        self._poll: EnginePoll | None = None
        self._knows_stats = False
        self._ended: StageLog | None = None
        self._spans: SpanExport | None = None
        self._worker_id = 0
        self._forward_passes: ForwardPassPublication | None = None
        self._sleeping: Sleeping | None = None
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=MOST_ROWS)  # of iteration stats that were not read

    # --- life ---

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[TrtxEngine, WorkerConfig]:
        engine = cls(parse(list(argv or ())))
        return engine, engine.worker_config()

    def worker_config(self) -> WorkerConfig:
        """How this worker registers with Dynamo.

        Addresses and planes come from the environment that the topology sets.
        """
        options = self.options
        template = registered_template(
            options.model, os.environ, prompts_by=options.prompts_by, replacing=options.chat_template
        )
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
            custom_jinja_template=None if template is None else str(template),
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        self.status.update(worker_id=worker_id)
        self._background.begin(watch.watch_ranks(self.status))
        try:
            with nothing_of_it_is_garbage():
                self._multimodal = multimodal = MultimodalSetup(self.options)
                await multimodal.before_engine()
                loaded = await asyncio.to_thread(loading.load, self.options)
                self._loaded = loaded
                await multimodal.with_engine(loaded.engine, loaded.tokenizer)
        except Exception as error:
            self.start_error = str(error) or type(error).__name__
            self.status.update(error=self.start_error)
            raise
        self._metrics.media, facts = multimodal.metrics, loaded.engine.facts
        self._metrics.shared_weights = facts.shared_weights
        self._poll = poll = EnginePoll(loaded.engine, on_stats=self._on_stats, on_events=self._on_events)
        self._worker_id = worker_id
        if self.options.status_file is not None:
            of_engine = () if loaded.engine.engine_pid is None else (loaded.engine.engine_pid,)
            self._ended = StageLog(requests_file(self.options.status_file), self.options.name, of_engine)
        if os.environ.get(ENABLED) == "1" and (endpoint := os.environ.get(ENDPOINT)):
            self._spans = SpanExport(endpoint, os.environ.get(SERVICE, self.options.name))
        self._sleeping = Sleeping(self.options.name, loaded.engine, self.status, self._unfinished)
        parts = WorkerParts(
            self.options,
            loaded,
            new_id=loaded.api.new_request_ids(worker_id),
            poll=poll,
            metrics=self._metrics,
            open_requests=self._open,
            leaving=self.leaving,
            sleeping=self._sleeping,
            media_loader=multimodal.media_loader,
            encoder=multimodal.encoder,
            ended=self._ended,
            spans=self._spans,
        )
        self._handler = RequestHandler(parts)
        self._metrics.handoff = loaded.engine.handoff_stats
        self._metrics.transfers = TransferCounts() if self.options.role in ("prefill", "decode") else None
        if (engine_pid := loaded.engine.engine_pid) is not None and engine_pid != os.getpid():
            self._metrics.processes["engine"] = engine_pid
        self._metrics.lost_kv_events = lambda: poll.lost_events
        if self.options.role != "encode":
            self._metrics.trtllm = TrtllmMetrics(
                loaded.api.engine_type,
                reads_kv=self.options.role == "decode",
                event_buffer=loaded.kv_event_buffer or None,
                lost_events=lambda: poll.lost_events,
            )
        self._metrics.iterations[0] = {  # reported until the engine's first step
            "numActiveRequests": 0,
            "numQueuedRequests": 0,
            "kvCacheStats": {"maxNumBlocks": facts.num_blocks, "usedNumBlocks": 0} if facts.num_blocks else {},
        }
        if self.options.role != "encode":
            poll.start()
        self._background.begin(self._leave_when_dead(loaded))
        if self._metrics.transfers is not None and self.options.role == "decode":
            self._background.begin(watch.watch_handoffs(self.status, self._metrics.transfers))
        self.status.update(
            state="serving",
            engine_pid=engine_pid or os.getpid(),
            device_memory_bytes=loaded.engine.device_memory_bytes(self._metrics.iterations.values()),
            kv_blocks=facts.num_blocks,
            load_seconds=round(loaded.load_seconds, 3),
            ranks=descendants(os.getpid()),
        )
        logger.info("%s serves %s, context %d", self.options.name, self.options.model, facts.context_length)
        return EngineConfig(
            model=str(self.options.model),
            served_model_name=self.options.served_model_name,
            runtime_data=loading.worker_facts(self.options, loaded.api, facts).to_runtime_data(),
            llm=LlmRegistration(
                context_length=facts.context_length,
                kv_cache_block_size=facts.block_size,
                total_kv_blocks=facts.num_blocks,
                max_num_seqs=facts.max_batch_size,
                max_num_batched_tokens=facts.max_num_tokens,
                data_parallel_size=facts.dp_size,
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        if self._sleeping is not None:
            self._sleeping.endpoint = endpoint
        # the model can be served without an encode worker: text needs none, and agg or prefill workers encode images
        # themselves
        if self.options.role == "encode":
            self.leaving.withdraw = partial(unregister_model, endpoint)
        elif self._loaded is not None and wants_forward_passes(os.environ):
            dp_size = self._loaded.engine.facts.dp_size
            self._forward_passes = ForwardPassPublication(endpoint, self._worker_id, dp_size)

    async def is_quiescent(self) -> bool | None:
        """Returns True when no request runs and no decode worker is about to read KV from this worker.

        Dynamo 1.6.1 calls this for prefill workers only: repeatedly after a stop request, until its drain budget is
        spent.
        """
        if self.status.status.state == "serving":
            self.status.update(state="draining")
        if self._open or self._metrics.open_requests:
            self._unread.requests_are_open()
            return False
        if self._loaded is None or self.leaving.engine_died:
            return True
        return not self._unread.are_wanted(self._handoffs(self._loaded))

    def _unfinished(self) -> str:
        """Describes what the engine must finish before its memory may change; empty if nothing."""
        parts = [(self._metrics.open_requests or len(self._open), "open request")]
        if self._loaded is not None:
            parts.append((self._handoffs(self._loaded), "unread handoff"))
        return " and ".join(f"it has {count} {what}{'s' * (count > 1)}" for count, what in parts if count)

    def _handoffs(self, loaded: LoadedEngine) -> int:
        """Number of handoffs that a decode worker may still read from this worker; 0 unless it is a prefill worker."""
        if self.options.role != "prefill":
            return 0
        return loaded.engine.unread_handoffs(self._metrics.iterations.values())

    async def cleanup(self) -> None:
        """Waits, within bounds, for the requests that have begun, then shuts the engine down.

        Safe to call after a failed ``start``, and more than once.
        """
        await self.leaving.withdrawn()
        self.leaving.drain()
        loaded = self._loaded
        if loaded is None:
            if self._multimodal is not None:
                await self._multimodal.close()
            return
        self.status.update(state="draining")
        # A prefill worker is drained already: Dynamo polled is_quiescent until its budget, set to --drain-seconds, was
        # spent.
        is_short = self.leaving.engine_died or self.options.role == "prefill"
        await self._drain(4 * GONE_SECONDS if is_short else self.options.drain_seconds)
        if not self.leaving.engine_died and (unread := self._handoffs(loaded)):
            logger.warning(
                "%s: %d leases end unread; their decode workers compute the prompts again", self.options.name, unread
            )
        self._background.cancel()
        for log in (self._ended, self._spans):
            if log is not None:
                await asyncio.to_thread(log.close)
        if self._poll is not None:
            await asyncio.to_thread(self._poll.stop)
        if self._forward_passes is not None:
            self._forward_passes.close()
        if self._multimodal is not None:
            await self._multimodal.close()
        self._loaded = None
        self.leaving.ends_engine = True
        if not await asyncio.to_thread(loaded.shutdown):
            self.engine_hangs = True
            logger.error("%s: the engine did not end in %g s", self.options.name, loaded.shutdown_seconds)

    async def _drain(self, seconds: float) -> None:
        """Waits up to ``seconds`` until the worker is quiescent, then aborts the requests that are still open.

        Dynamo 1.6.1 calls ``cleanup`` while requests are still running; shutting the engine down at once would cut them
        off.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.is_quiescent():
            if asyncio.get_running_loop().time() > deadline:
                logger.warning(
                    "%s: %d requests cut off after %g s of draining", self.options.name, len(self._open), seconds
                )
                self._open.abort_all()
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _leave_when_dead(self, loaded: LoadedEngine) -> None:
        stall_seconds = self.options.stall_seconds
        reason = await watch.until_death(loaded, self.status, self._metrics, stall_seconds=stall_seconds)
        self.leaving.engine_is_dead(reason, open_requests=len(self._open))

    # --- requests ---

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Returns the handler's own generator: wrapping it in another one would cost time on every chunk."""
        assert self._handler is not None, "Dynamo registers a worker once it has started"
        return self._handler.generate(request, context)

    async def abort(self, context: Context) -> None:
        self._open.abort(context.id())

    # --- metrics, KV events and health for Dynamo ---

    async def register_prometheus(self, metrics: Any) -> None:
        registry = CollectorRegistry()
        registry.register(self._metrics)
        register_engine_registry(metrics, registry)

    async def kv_event_sources(self) -> list[KvEventSource]:
        loaded, poll = self._loaded, self._poll
        block_size = loaded.engine.facts.block_size if loaded is not None and loaded.kv_event_buffer else None
        if loaded is None or poll is None or block_size is None:
            return []
        return [
            PushSource(
                on_ready=lambda publisher, rank=rank: poll.publish_events(publisher, block_size, rank),
                dp_rank=rank,
            )
            for rank in range(loaded.engine.facts.dp_size)
        ]

    def component_metrics_dp_ranks(self) -> list[int]:
        facts = self._loaded.engine.facts if self._loaded is not None else None
        return list(range(facts.dp_size)) if facts is not None and facts.num_blocks else []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        if self._poll is not None:
            self._poll.publish_load(publisher)

    async def health_check_payload(self) -> dict[str, Any] | None:
        if self._loaded is None:
            return None
        payload: dict[str, Any] = build_health_check_payload(loading.probe_token_id(self.options.model))
        return payload

    def _on_stats(self, row: Mapping[str, Any]) -> None:
        """Takes one row of iteration stats. Called from the polling thread."""
        if not self._knows_stats:
            self._knows_stats = True
            if absent := absent_fields(row):
                logger.info("this engine's iteration stats lack %s; their metrics are missing", ", ".join(absent))
        self._metrics.saw_iteration(row)
        self._rows.append(row)
        if self._forward_passes is not None:
            self._forward_passes.publish(row)

    def _on_events(self, count: int) -> None:
        """Counts KV events that were read. Called from the polling thread."""
        if self._metrics.trtllm is not None:
            self._metrics.trtllm.read_events(count)

    def supported_controls(self) -> set[str]:
        if self.options.role == "encode":
            return set()
        sleeps = self._loaded is not None and self._loaded.engine.facts.sleeps
        return {STATS_CONTROL, *CONTROLS} if sleeps else {STATS_CONTROL}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """``iteration_stats`` returns the rows since the last call, as ``/metrics`` of trtllm-serve does.
        :mod:`trtx.worker.sleeping` describes all others.
        """
        if control in CONTROLS and self._sleeping is not None:
            return await self._sleeping.control(control, body)
        if control != STATS_CONTROL:
            return {"status": "error", "message": f"{control} is not a control of trtx; expected {STATS_CONTROL}"}
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        return {"status": "ok", STATS_CONTROL: rows}

"""A worker's metrics under the names of TensorRT-LLM's own, for every engine, so that its dashboards work with trtx.

TensorRT-LLM's own collector isn't used: it needs TensorRT-LLM's engine, and its families change with each version.
``served_families.trtllm_families`` has the record of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trtx.engine.api import Transfer
from trtx.engine.served_family import ServedFamily
from trtx.worker.bucket_counts import BucketCounts
from trtx.worker.iteration_rows import StepNumbers, by_rank, known_family, value_at
from trtx.worker.requests.stage_clock import EndedRequest
from trtx.worker.served_families import trtllm_families as names

# Upper bounds of the buckets, as TensorRT-LLM and Dynamo have them, in the units of the families.
_LONG = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TPOT = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_PREFILL = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_CACHED_TOKENS = (0.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_STEP_TOKENS = (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_TRANSFER_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TRANSFER_BYTES = (1e5, 5e5, 1e6, 5e6, 1e7, 5e7, 1e8, 5e8, 1e9, 5e9)
_TRANSFER_SPEED = (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_EVENTS = tuple(float(1 << power) for power in range(18))
_SUCCESSES = ("stop", "length", "cancelled")
# Metric family, field of a row of iteration stats, and factor that converts its unit.
_GAUGES: tuple[tuple[ServedFamily, str, float], ...] = (
    (names.RUNNING, "numActiveRequests", 1),
    (names.WAITING, "numQueuedRequests", 1),
    (names.MAX_RUNNING, "maxNumActiveRequests", 1),
    (names.ITERATION_SECONDS, "iterLatencyMS", 1e-3),
    (names.CPU_MEMORY, "cpuMemUsage", 1),
    (names.PINNED_MEMORY, "pinnedMemUsage", 1),
    (names.STATIC_BATCH, "maxBatchSizeStatic", 1),
    (names.RUNTIME_BATCH, "maxBatchSizeRuntime", 1),
    (names.RUNTIME_TOKENS, "maxNumTokensRuntime", 1),
    (names.CONTEXT_REQUESTS, "inflightBatchingStats.numContextRequests", 1),
    (names.GENERATION_REQUESTS, "inflightBatchingStats.numGenRequests", 1),
    (names.PAUSED_REQUESTS, "inflightBatchingStats.numPausedRequests", 1),
    (names.SCHEDULED_REQUESTS, "inflightBatchingStats.numScheduledRequests", 1),
    (names.CONTEXT_TOKENS, "inflightBatchingStats.numCtxTokens", 1),
    (names.DECODED_TOKENS, "inflightBatchingStats.avgNumDecodedTokensPerIter", 1),
    (names.KV_HIT_RATE, "kvCacheStats.cacheHitRate", 1),
    (names.KV_MAX_BLOCKS, "kvCacheStats.maxNumBlocks", 1),
    (names.KV_FREE_BLOCKS, "kvCacheStats.freeNumBlocks", 1),
    (names.KV_USED_BLOCKS, "kvCacheStats.usedNumBlocks", 1),
    (names.KV_BLOCK_TOKENS, "kvCacheStats.tokensPerBlock", 1),
    (names.KV_REUSED_BLOCKS, "kvCacheStats.reusedBlocks", 1),
    (names.KV_MISSED_BLOCKS, "kvCacheStats.missedBlocks", 1),
    (names.ACCEPTANCE_LENGTH, "specDecodingStats.acceptanceLength", 1),
    (names.DRAFT_OVERHEAD, "specDecodingStats.draftOverhead", 1),
)
# Metric family, and two fields of which it is the quotient.
_SHARES: tuple[tuple[ServedFamily, str, str], ...] = (
    (names.KV_UTILIZATION, "kvCacheStats.usedNumBlocks", "kvCacheStats.maxNumBlocks"),
    (names.PREFILL_OCCUPANCY, "inflightBatchingStats.numContextRequests", "maxNumActiveRequests"),
)
# Metric family, and the field that it sums over all rows.
_SUMS: tuple[tuple[ServedFamily, str], ...] = (
    (names.COMPLETED, "numCompletedRequests"),
    (names.DRAFT_TOKENS, "specDecodingStats.numDraftTokens"),
    (names.ACCEPTED_TOKENS, "specDecodingStats.numAcceptedTokens"),
)


class TrtllmMetrics:
    """The ``trtllm_*`` families of one worker.

    No locks: only the event loop writes the counts of requests, and only the polling thread those of the engine.
    """

    def __init__(
        self, engine_type: str, *, reads_kv: bool, event_buffer: int | None, lost_events: Callable[[], int]
    ) -> None:
        """``reads_kv``: a decode worker. ``event_buffer``: capacity; None if no KV events are published."""
        self._label = (engine_type,)
        self._reads_kv, self._event_buffer, self._lost_events = reads_kv, event_buffer, lost_events
        self._successes = dict.fromkeys(_SUCCESSES, 0)
        self._e2e, self._ttft, self._tpot = BucketCounts(_LONG), BucketCounts(_TTFT), BucketCounts(_TPOT)
        self._queue, self._prefill = BucketCounts(_LONG), BucketCounts(_PREFILL)
        self._decode, self._inference = BucketCounts(_LONG), BucketCounts(_LONG)
        self._cached = BucketCounts(_CACHED_TOKENS)
        self._prompt_tokens = self._tokens = self._cached_tokens = 0
        self._images = self._grammars = self._transfers = 0
        self._transfer_s, self._transfer_bytes = BucketCounts(_TRANSFER_SECONDS), BucketCounts(_TRANSFER_BYTES)
        self._transfer_speed = BucketCounts(_TRANSFER_SPEED)
        self._sums: dict[str, float] = {}
        self._steps = StepNumbers()
        self._step_tokens: BucketCounts | None = None  # None: the engine does not report it
        self._event_batch = BucketCounts(_EVENTS)

    # --- what happens ---

    def began(self, *, has_images: bool, has_grammar: bool) -> None:
        """Records a request that the engine got."""
        self._images += has_images
        self._grammars += has_grammar

    def ended(self, row: EndedRequest) -> None:
        """Counts a request that has ended. As in TensorRT-LLM, failed requests don't count."""
        if row.outcome not in self._successes:
            return
        self._successes[row.outcome] += 1
        self._e2e.observe(row.ended_s)
        _observe(self._ttft, row.first_chunk_s)
        if row.tokens is not None and row.tokens > 1 and row.last_chunk_s and row.first_chunk_s:
            self._tpot.observe((row.last_chunk_s - row.first_chunk_s) / (row.tokens - 1))
        _observe(self._queue, row.queue_s)
        _observe(self._prefill, row.prefill_s)
        _observe(self._decode, row.decode_s)
        computed = row.prefill_s if row.prefill_s is not None else row.first_step_s
        if computed is not None:
            self._inference.observe(computed + (row.decode_s or 0.0))
        self._prompt_tokens += row.prompt_tokens or 0
        self._tokens += row.tokens or 0
        if row.cached_tokens is not None:
            self._cached_tokens += row.cached_tokens
            self._cached.observe(row.cached_tokens)

    def transferred(self, transfer: Transfer) -> None:
        """Records the end of the read of a request's KV. ``seconds`` 0: nothing arrived."""
        if transfer.seconds <= 0:
            return
        self._transfers += 1
        self._transfer_s.observe(transfer.seconds)
        self._transfer_bytes.observe(transfer.bytes)
        if transfer.bytes:
            self._transfer_speed.observe(transfer.bytes / transfer.seconds / 1e9)

    def saw_iteration(self, row: Mapping[str, Any]) -> None:
        """Adds one row of the engine's iteration stats to the sums, unless it repeats a step.

        Called from the polling thread.
        """
        if not self._steps.is_new(row):
            return
        for family, path in _SUMS:
            if (value := value_at(row, path)) is not None:
                self._sums[family.name] = self._sums.get(family.name, 0) + value
        if (tokens := value_at(row, "inflightBatchingStats.numCtxTokens")) is not None:
            self._step_tokens = self._step_tokens or BucketCounts(_STEP_TOKENS)
            if tokens:
                self._step_tokens.observe(tokens)

    def read_events(self, count: int) -> None:
        """Counts KV events that were read. Called from the polling thread."""
        self._event_batch.observe(count)

    # --- what is served ---

    def collect(self, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[Any]:
        """``rows``: the last row of iteration stats of each attention-DP rank."""
        yield from self._request_families()
        yield from self._iteration_families(rows)
        if self._reads_kv:
            yield names.TRANSFERS.family([(self._label, self._transfers)])
            yield self._transfer_s.of(names.TRANSFER_SECONDS, self._label)
            yield self._transfer_bytes.of(names.TRANSFER_BYTES, self._label)
            yield self._transfer_speed.of(names.TRANSFER_SPEED, self._label)
        if self._event_buffer is not None:
            yield names.EVENT_CAPACITY.family([(self._label, self._event_buffer)])
            yield self._event_batch.of(names.EVENT_BATCH, self._label)
            yield names.LOST_EVENTS.family([(self._label, self._lost_events())])

    def _request_families(self) -> Iterator[Any]:
        ended = ((names.E2E_SECONDS, self._e2e), (names.TTFT_SECONDS, self._ttft), (names.TPOT_SECONDS, self._tpot))
        stages = ((names.QUEUE_SECONDS, self._queue), (names.PREFILL_SECONDS, self._prefill))
        rest = ((names.DECODE_SECONDS, self._decode), (names.INFERENCE_SECONDS, self._inference))
        for family, counts in (*ended, *stages, *rest, (names.REQUEST_CACHED_TOKENS, self._cached)):
            yield counts.of(family, self._label)
        yield names.SUCCESSES.family([((*self._label, reason), count) for reason, count in self._successes.items()])
        for family, value in (
            (names.PROMPT_TOKENS, self._prompt_tokens),
            (names.GENERATION_TOKENS, self._tokens),
            (names.CACHED_TOKENS, self._cached_tokens),
            (names.ABORTED, self._successes["cancelled"]),
            (names.IMAGE_REQUESTS, self._images),
            (names.GRAMMAR_REQUESTS, self._grammars),
        ):
            yield family.family([(self._label, value)])

    def _iteration_families(self, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[Any]:
        named = [((*self._label, *rank), row) for rank, row in by_rank(rows)]
        for family, path, scale in _GAUGES:
            yield from known_family(family, [(labels, value_at(row, path)) for labels, row in named], scale)
        # an engine without a GPU reports 0
        memory = [(labels, value_at(row, "gpuMemUsage") or None) for labels, row in named]
        yield from known_family(names.GPU_MEMORY, memory)
        for family, path, whole in _SHARES:
            yield from known_family(family, [(labels, _share(row, path, whole)) for labels, row in named])
        for family, _ in _SUMS:
            yield from known_family(family, [(self._label, self._sums.get(family.name))])
        if self._step_tokens is not None:
            yield self._step_tokens.of(names.PREFILL_TOKENS, self._label)


def _observe(counts: BucketCounts, value: float | None) -> None:
    if value is not None:
        counts.observe(value)


def _share(row: Mapping[str, Any], path: str, whole: str) -> float | None:
    part, total = value_at(row, path), value_at(row, whole)
    return None if part is None or not total else part / total

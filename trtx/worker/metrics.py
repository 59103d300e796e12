"""Prometheus metrics of a worker: its requests, its engine, its processes and its GPUs.

They are served on the worker's system port together with Dynamo's ``dynamo_component_*``; Dynamo adds its labels at
scrape time. ``served_families`` has the record of each, and ``trtllm_metrics`` those under TensorRT-LLM's names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.registry import Collector

from trtx.engine.api import HandoffTotals
from trtx.engine.served_family import ServedFamily
from trtx.worker.bucket_counts import LATENCY_BUCKETS, BucketCounts
from trtx.worker.gpu_metrics import GpuMetrics
from trtx.worker.iteration_rows import by_rank, known_family, value_at
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.process_metrics import process_families
from trtx.worker.served_families import kv_families, request_families, step_families
from trtx.worker.step_totals import StepTotals
from trtx.worker.transfers import TransferCounts
from trtx.worker.trtllm_metrics import TrtllmMetrics

TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CHUNK_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
OUTCOMES = ("stop", "length", "cancelled", "invalid", "error")

_MS = 1e-3
_UNNAMED = "unknown"
_POOL = "kvCacheStats."
_TIERS = {"gpu": _POOL, "host": "hostKvCacheStats."}
"""The section of the iteration stats that has a tier's values; those of tier host only with a host tier."""
# Metric family, field of TensorRT-LLM's iteration stats, and factor that converts its unit to Prometheus's.
_ITERATION_FAMILIES: tuple[tuple[ServedFamily, str, float], ...] = (
    (step_families.RUNNING_REQUESTS, "numActiveRequests", 1),
    (step_families.QUEUED_REQUESTS, "numQueuedRequests", 1),
    (step_families.QUEUED_CONTEXT_TOKENS, "inflightBatchingStats.numQueuedCtxTokens", 1),
    (step_families.PAUSED_REQUESTS, "inflightBatchingStats.numPausedRequests", 1),
    (step_families.BATCH_REQUESTS, "inflightBatchingStats.numScheduledRequests", 1),
    (step_families.BATCH_CONTEXT_TOKENS, "inflightBatchingStats.numCtxTokens", 1),
    (step_families.BATCH_DECODES, "inflightBatchingStats.numGenRequests", 1),
    (step_families.QUEUE_SECONDS, "newActiveRequestsQueueLatencyMS", _MS),
    (step_families.ITERATION_SECONDS, "iterLatencyMS", _MS),
    (kv_families.KV_BLOCKS, "kvCacheStats.maxNumBlocks", 1),
    (kv_families.KV_BLOCKS_USED, "kvCacheStats.usedNumBlocks", 1),
    (kv_families.KV_HIT_RATE, "kvCacheStats.cacheHitRate", 1),
)
# As above, for fields that only the torch engine has.
_TORCH_FAMILIES: tuple[tuple[ServedFamily, str, float], ...] = (
    (step_families.PREEMPTIONS, "numPreemptions", 1),
    (step_families.GRAPH_MISSES, "numGraphMisses", 1),
    (step_families.EXPERT_TOKENS, "expertStats.numRoutedTokens", 1),
    (step_families.GRAMMARS_CACHED, "guidedDecodingStats.numCached", 1),
)
# Metric family, its tiers, and the field of each value of its last label.
_OUTCOME_FAMILIES: tuple[tuple[ServedFamily, tuple[str, ...], dict[str, str]], ...] = (
    (kv_families.KV_LOOKUPS, tuple(_TIERS), {"hit": "kvCacheStats.reusedBlocks", "miss": "kvCacheStats.missedBlocks"}),
    (
        step_families.GRAMMAR_LOOKUPS,
        (),
        {"compiled": "guidedDecodingStats.numCompiled", "cached": "guidedDecodingStats.numReused"},
    ),
    (
        step_families.EXPERT_IMBALANCE,
        (),
        {"expert": "expertStats.expertImbalance", "rank": "expertStats.rankImbalance"},
    ),
    (
        kv_families.KV_TIER_BYTES,
        (),
        {"stored": "hostKvCacheStats.storedBytes", "loaded": "hostKvCacheStats.loadedBytes"},
    ),
    (
        kv_families.KV_TIER_SECONDS,
        (),
        {"stored": "hostKvCacheStats.storeSeconds", "loaded": "hostKvCacheStats.loadSeconds"},
    ),
)


class RequestClock:
    """Measures the latencies of one request, from ``generate`` to its last token."""

    __slots__ = ("_last", "_started", "metrics")

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.metrics = metrics
        self._started = time.perf_counter()
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """Records a chunk of ``count`` tokens.

        The time since the last chunk is divided evenly among its tokens.
        """
        if not count:
            return
        metrics, now = self.metrics, time.perf_counter()
        metrics.chunk_tokens.observe(count)
        metrics.generated_tokens += count
        if self._last:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        else:
            metrics.time_to_first_token.observe(now - self._started)
        self._last = now


class WorkerMetrics(Collector):
    """The metric families of one worker.

    No locks: only the event loop writes the counters of requests, and only the polling thread those of the engine.
    """

    def __init__(self) -> None:
        self.time_to_first_token = BucketCounts(TTFT_BUCKETS)
        self.inter_token_latency = BucketCounts(LATENCY_BUCKETS)
        self.chunk_tokens = BucketCounts(CHUNK_BUCKETS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.open_requests = 0
        # Attention-DP rank -> its latest iteration stats, under TensorRT-LLM's keys. Without attention DP there is only
        # rank 0.
        self.iterations: dict[int, Mapping[str, Any]] = {}
        self.lost_kv_events: Callable[[], int] = lambda: 0
        self.media: MediaMetrics | None = None  # None for a text-only worker
        # Read at each scrape: leases are also released when no step runs, so iteration stats would miss that.
        self.handoff: Callable[[], HandoffTotals | None] = lambda: None
        self.transfers: TransferCounts | None = None  # None for roles other than prefill and decode
        self.shared_weights: tuple[str, int] | None = None  # "loaded" or "mapped", and bytes; None: not shared
        self.trtllm: TrtllmMetrics | None = None  # None for an encode worker
        self.processes = {"worker": os.getpid()}  # name -> pid
        self._steps = StepTotals()
        self._gpus = GpuMetrics()

    def saw_iteration(self, row: Mapping[str, Any]) -> None:
        """Takes one row of the engine's iteration stats. Called from the polling thread."""
        self._steps.add(row)
        if self.trtllm is not None:
            self.trtllm.saw_iteration(row)
        self.iterations[row.get("attentionDpRank") or 0] = row

    def collect(self) -> Iterator[Any]:
        yield self.time_to_first_token.of(request_families.TIME_TO_FIRST_TOKEN)
        yield self.inter_token_latency.of(request_families.INTER_TOKEN_LATENCY)
        yield self.chunk_tokens.of(request_families.CHUNK_TOKENS)
        yield request_families.REQUESTS.family([((outcome,), count) for outcome, count in self.outcomes.items()])
        yield request_families.PROMPT_TOKENS.of(self.prompt_tokens)
        yield request_families.CACHED_TOKENS.of(self.cached_tokens)
        yield request_families.GENERATED_TOKENS.of(self.generated_tokens)
        yield request_families.OPEN_REQUESTS.of(self.open_requests)
        yield from self._iteration_families()
        yield from self._steps.collect()
        yield from self._handoff_families()
        if self.shared_weights is not None:
            how, count = self.shared_weights
            yield step_families.SHARED_WEIGHTS.family([((how,), count)])
        if self.trtllm is not None:
            yield from self.trtllm.collect(self.iterations)
        if self.media is not None:
            yield from self.media.collect()
        yield from process_families(self.processes)
        yield from self._gpus.collect()

    def _iteration_families(self) -> Iterator[Any]:
        named = by_rank(self.iterations)
        for family, path, scale in (*_ITERATION_FAMILIES, *_TORCH_FAMILIES):
            samples = [
                ((*tier, *rank), value_at(row, field))
                for tier, field in _of_tiers(path, _TIERS if family.labels else ())
                for rank, row in named
            ]
            yield from known_family(family, samples, scale)
        for family, tiers, paths in _OUTCOME_FAMILIES:
            samples = [
                ((*tier, outcome, *rank), value_at(row, field))
                for rank, row in named
                for outcome, path in paths.items()
                for tier, field in _of_tiers(path, tiers)
            ]
            yield from known_family(family, samples)
        if self.iterations:
            yield kv_families.LOST_KV_EVENTS.of(self.lost_kv_events())

    def _handoff_families(self) -> Iterator[Any]:
        totals = self.handoff()
        if self.transfers is not None:
            yield kv_families.WHOLE_REQUESTS.of(self.transfers.whole)
            yield kv_families.LOCAL_PREFILLS.of(self.transfers.local)
            yield from _pair_families(self.transfers)
        if totals is None:
            if self.transfers is not None and self.transfers.is_known:
                yield from _read_families(self.transfers)
            return
        yield from _read_families(totals)
        yield kv_families.RECOMPUTED.of(totals.recomputed)
        yield kv_families.FAILED_READS.of(totals.failed_reads)
        yield kv_families.LEASES.of(totals.leases)
        yield kv_families.EXPIRED_LEASES.of(totals.expired_leases)
        yield kv_families.CORRUPTED.of(totals.corrupted)


def _of_tiers(path: str, tiers: Iterable[str]) -> list[tuple[tuple[str, ...], str]]:
    """The label and the field of each tier; for a family without tiers, only its own field, without a label."""
    return [((tier,), path.replace(_POOL, _TIERS[tier])) for tier in tiers] or [((), path)]


def _pair_families(transfers: TransferCounts) -> Iterator[Any]:
    """Handoff metrics per prefill worker. A pair appears with its first request."""
    pairs = [(name or _UNNAMED, pair) for name, pair in sorted(transfers.pairs.items())]
    outcomes = [((name, outcome), count) for name, pair in pairs for outcome, count in pair.outcomes.items()]
    yield kv_families.PAIR_HANDOFFS.family(outcomes)
    yield kv_families.PAIR_BYTES.family([((name,), pair.bytes) for name, pair in pairs])
    yield kv_families.PAIR_SECONDS.family([((name,), pair.seconds) for name, pair in pairs])


def _read_families(counts: HandoffTotals | TransferCounts) -> Iterator[Any]:
    yield kv_families.HANDOFF_READS.of(counts.reads)
    yield kv_families.HANDOFF_BYTES.of(counts.bytes)
    yield kv_families.HANDOFF_SECONDS.of(counts.seconds)


def absent_fields(row: Mapping[str, Any]) -> list[str]:
    """Fields of iteration stats that ``row`` lacks.

    An older engine may lack some; their metric families are then not exported.
    """
    return [path for _, path, _ in _ITERATION_FAMILIES if value_at(row, path) is None]

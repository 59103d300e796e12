"""Prometheus metrics of a worker's requests and engine: the ``trtx_*`` families.

They are served on the worker's system port together with Dynamo's ``dynamo_component_*``; Dynamo adds its labels at
scrape time. Histograms are plain lists, because at 50,000 tokens/s the request path can't afford prometheus_client's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from trtx.engine.api import HandoffTotals
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.transfers import TransferCounts

TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CHUNK_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
OUTCOMES = ("stop", "length", "cancelled", "invalid", "error")

_MS = 1e-3
_UNNAMED = "unknown"
# Metric family, help text, field of TensorRT-LLM's iteration stats, and factor that converts its unit to Prometheus's.
_ITERATION_FAMILIES = (
    ("trtx_running_requests", "Requests in the engine's running set.", "numActiveRequests", 1),
    ("trtx_queued_requests", "Requests that wait for the engine.", "numQueuedRequests", 1),
    ("trtx_queued_context_tokens", "Prompt tokens that wait.", "inflightBatchingStats.numQueuedCtxTokens", 1),
    ("trtx_batch_requests", "Requests in the last step.", "inflightBatchingStats.numScheduledRequests", 1),
    ("trtx_batch_context_tokens", "Prompt tokens in the last step.", "inflightBatchingStats.numCtxTokens", 1),
    ("trtx_queue_seconds", "Queue time of the requests last admitted.", "newActiveRequestsQueueLatencyMS", _MS),
    ("trtx_iteration_seconds", "Duration of the last step.", "iterLatencyMS", _MS),
    ("trtx_kv_blocks", "KV blocks in the pool.", "kvCacheStats.maxNumBlocks", 1),
    ("trtx_kv_blocks_used", "KV blocks that requests and leases hold.", "kvCacheStats.usedNumBlocks", 1),
    ("trtx_kv_hit_rate", "Share of prompt blocks found in the prefix cache.", "kvCacheStats.cacheHitRate", 1),
)


class _Histogram:
    """Counts per bucket and the sum of values, as in a Prometheus histogram."""

    __slots__ = ("_buckets", "_counts", "_sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        cumulative, total = [], 0
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=cumulative, sum_value=self._sum)


class RequestClock:
    """Measures the latencies of one request, from ``generate`` to its last token."""

    __slots__ = ("_last", "_started", "metrics")

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.metrics = metrics
        self._started = time.perf_counter()
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """Records a chunk of ``count`` tokens.

        The gap before it is split evenly, because each token took one engine step.
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
    """The metric families of one worker. No locks: only the event loop writes the counters."""

    def __init__(self) -> None:
        self.time_to_first_token = _Histogram(TTFT_BUCKETS)
        self.inter_token_latency = _Histogram(ITL_BUCKETS)
        self.chunk_tokens = _Histogram(CHUNK_BUCKETS)
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

    def collect(self) -> Iterator[Any]:
        yield self.time_to_first_token.family(
            "trtx_time_to_first_token_seconds", "From the request's arrival in this worker to its first token."
        )
        yield self.inter_token_latency.family(
            "trtx_inter_token_latency_seconds", "Between two tokens of one request; a chunk's tokens share its gap."
        )
        yield self.chunk_tokens.family("trtx_chunk_tokens", "Tokens that left together in one chunk.")
        outcomes = CounterMetricFamily("trtx_requests", "Requests that ended, by outcome.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        yield CounterMetricFamily("trtx_prompt_tokens", "Prompt tokens of ended requests.", self.prompt_tokens)
        yield CounterMetricFamily("trtx_cached_tokens", "Of these, found in the prefix cache.", self.cached_tokens)
        yield CounterMetricFamily("trtx_generated_tokens", "Tokens handed to the frontend.", self.generated_tokens)
        yield GaugeMetricFamily("trtx_open_requests", "Requests between arrival and their end.", self.open_requests)
        yield from self._iteration_families()
        yield from self._handoff_families()
        if self.media is not None:
            yield from self.media.collect()

    def _iteration_families(self) -> Iterator[Any]:
        ranks = sorted(self.iterations.items())
        labels = ["dp_rank"] if len(ranks) > 1 else []
        for name, text, path, scale in _ITERATION_FAMILIES:
            family = GaugeMetricFamily(name, text, labels=labels)
            for rank, row in ranks:
                if (value := _at(row, path)) is not None:
                    family.add_metric([str(rank)] if labels else [], value * scale)
            if family.samples:
                yield family
        if self.iterations:
            yield CounterMetricFamily(
                "trtx_lost_kv_events", "KV events that the engine dropped before they were read.", self.lost_kv_events()
            )

    def _handoff_families(self) -> Iterator[Any]:
        totals = self.handoff()
        if self.transfers is not None:
            yield CounterMetricFamily(
                "trtx_whole_requests", "Requests that a decode worker served without a handoff.", self.transfers.whole
            )
            yield from _pair_families(self.transfers)
        if totals is None:
            if self.transfers is not None and self.transfers.is_known:
                yield from _read_families(self.transfers)
            return
        yield from _read_families(totals)
        yield CounterMetricFamily(
            "trtx_recomputed_prefixes", "Prompts computed again because their KV was gone.", totals.recomputed
        )
        yield CounterMetricFamily("trtx_handoff_failed_reads", "Reads that failed.", totals.failed_reads)
        yield GaugeMetricFamily("trtx_leases", "KV handoffs that wait for a decode worker.", totals.leases)
        yield CounterMetricFamily(
            "trtx_expired_leases", "Leases that no decode worker read in time.", totals.expired_leases
        )
        yield CounterMetricFamily(
            "trtx_corrupted_handoffs", "KV handoffs that TRTX_FAULT corrupted on purpose.", totals.corrupted
        )


def _pair_families(transfers: TransferCounts) -> Iterator[Any]:
    """Handoff metrics per prefill worker. A pair appears with its first request."""
    outcomes = CounterMetricFamily(
        "trtx_pair_handoffs",
        "Requests from a prefill worker, by what became of their KV.",
        labels=["prefill", "outcome"],
    )
    moved = CounterMetricFamily("trtx_pair_handoff_bytes", "Bytes of KV from a prefill worker.", labels=["prefill"])
    spent = CounterMetricFamily("trtx_pair_handoff_seconds", "Time of these reads, summed.", labels=["prefill"])
    for name, pair in sorted(transfers.pairs.items()):
        for outcome, count in pair.outcomes.items():
            outcomes.add_metric([name or _UNNAMED, outcome], count)
        moved.add_metric([name or _UNNAMED], pair.bytes)
        spent.add_metric([name or _UNNAMED], pair.seconds)
    yield from (outcomes, moved, spent)


def _read_families(counts: HandoffTotals | TransferCounts) -> Iterator[Any]:
    yield CounterMetricFamily("trtx_handoff_reads", "KV handoffs read from a prefill worker.", counts.reads)
    yield CounterMetricFamily("trtx_handoff_bytes", "Bytes of KV read from prefill workers.", counts.bytes)
    yield CounterMetricFamily("trtx_handoff_seconds", "Time of these reads, summed.", counts.seconds)


def absent_fields(row: Mapping[str, Any]) -> list[str]:
    """Fields of iteration stats that ``row`` lacks.

    An older engine may lack some; their metric families are then not exported.
    """
    return [path for _, _, path, _ in _ITERATION_FAMILIES if _at(row, path) is None]


def _at(row: Mapping[str, Any], path: str) -> float | None:
    section, _, name = path.rpartition(".")
    value: float | None = ((row.get(section) or {}) if section else row).get(name)
    return value

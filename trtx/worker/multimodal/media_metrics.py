"""Prometheus metrics of media: the embedding cache, encoded images, and the time spent per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from trtx.worker.multimodal.embedding_cache import EmbeddingCache

Stage = Literal["fetch", "prepare", "encode", "remote", "put"]
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "encode", "remote", "put")


class MediaMetrics:
    """Counters of one worker. Only its event loop writes them."""

    def __init__(self) -> None:
        # None until it is created, and for engines that keep embeddings themselves
        self.cache: EmbeddingCache[Any] | None = None
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._ended = dict.fromkeys(STAGES, 0)
        self.retries = 0  # calls repeated at another encode worker after one did not answer
        self.fallbacks = 0  # images encoded here because no encode worker answered

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Adds the duration of the ``with`` body to ``stage`` and counts one image, unless the body raises."""
        began = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - began
        self._ended[stage] += 1

    def passed(self, stage: Stage, pictures: int) -> None:
        """Counts further images that passed ``stage`` within one :meth:`timed`."""
        self._ended[stage] += pictures

    def collect(self) -> Iterator[Any]:
        if self.cache is not None:
            yield from self._of_cache(self.cache)
        seconds = CounterMetricFamily("trtx_media_seconds", "Time that pictures took, by stage.", labels=["stage"])
        pictures = CounterMetricFamily("trtx_media_pictures", "Pictures that passed, by stage.", labels=["stage"])
        for stage in STAGES:
            seconds.add_metric([stage], self._seconds[stage])
            pictures.add_metric([stage], self._ended[stage])
        yield seconds
        yield pictures
        yield CounterMetricFamily("trtx_encoder_retries", "Calls made again at another encode worker.", self.retries)
        yield CounterMetricFamily(
            "trtx_encoder_fallbacks", "Pictures encoded here because no encode worker answered.", self.fallbacks
        )

    @staticmethod
    def _of_cache(cache: EmbeddingCache[Any]) -> Iterator[Any]:
        stats = cache.stats
        asked = CounterMetricFamily(
            "trtx_embedding_cache_lookups", "Pictures that requests asked for, by outcome.", labels=["outcome"]
        )
        for outcome, count in (("hit", stats.hits), ("joined", stats.joined), ("miss", stats.misses)):
            asked.add_metric([outcome], count)
        yield asked
        yield CounterMetricFamily("trtx_embedding_cache_evictions", "Embeddings that made room.", stats.evictions)
        yield GaugeMetricFamily("trtx_embedding_cache_bytes", "Bytes of embeddings held.", cache.used_bytes)
        yield GaugeMetricFamily(
            "trtx_embedding_cache_pinned_bytes", "Of these, in use by open requests or being made.", cache.pinned_bytes
        )
        yield GaugeMetricFamily("trtx_embedding_cache_pictures", "Embeddings held.", len(cache))

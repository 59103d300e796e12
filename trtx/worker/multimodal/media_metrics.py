"""Prometheus metrics of media: the embedding cache, encoded images, and the time spent per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from trtx.worker.multimodal.embedding_cache import EmbeddingCache
from trtx.worker.served_families import media_families

Stage = Literal["fetch", "prepare", "encode", "remote", "put"]
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "encode", "remote", "put")


class MediaMetrics:
    """Counters of one worker. Only its event loop writes them."""

    def __init__(self) -> None:
        # None until it is created, and for engines that keep embeddings themselves
        self.cache: EmbeddingCache[Any] | None = None
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._ended = dict.fromkeys(STAGES, 0)
        self._open = dict.fromkeys(STAGES, 0)
        self.retries = 0  # calls repeated at another encode worker after one did not answer
        self.fallbacks = 0  # images encoded here because no encode worker answered

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Adds the duration of the ``with`` body to ``stage`` and counts one image, unless the body raises."""
        began = time.perf_counter()
        self._open[stage] += 1
        try:
            yield
        finally:
            self._open[stage] -= 1
        self._seconds[stage] += time.perf_counter() - began
        self._ended[stage] += 1

    def passed(self, stage: Stage, pictures: int) -> None:
        """Counts further images that passed ``stage`` within one :meth:`timed`."""
        self._ended[stage] += pictures

    def collect(self) -> Iterator[Any]:
        if self.cache is not None:
            yield from self._of_cache(self.cache)
        yield media_families.MEDIA_SECONDS.family([((stage,), seconds) for stage, seconds in self._seconds.items()])
        yield media_families.MEDIA_IMAGES.family([((stage,), count) for stage, count in self._ended.items()])
        yield media_families.MEDIA_OPEN.family([((stage,), count) for stage, count in self._open.items()])
        yield media_families.ENCODER_RETRIES.of(self.retries)
        yield media_families.ENCODER_FALLBACKS.of(self.fallbacks)

    @staticmethod
    def _of_cache(cache: EmbeddingCache[Any]) -> Iterator[Any]:
        stats = cache.stats
        outcomes = (("hit", stats.hits), ("joined", stats.joined), ("miss", stats.misses))
        yield media_families.CACHE_LOOKUPS.family([((outcome,), count) for outcome, count in outcomes])
        yield media_families.CACHE_EVICTIONS.of(stats.evictions)
        yield media_families.CACHE_BYTES.of(cache.used_bytes)
        yield media_families.CACHE_PINNED_BYTES.of(cache.pinned_bytes)
        yield media_families.CACHE_EMBEDDINGS.of(len(cache))

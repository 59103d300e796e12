"""A request's pictures on their way into the engine: fetched, known by their content, encoded where they are new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import TowerOutput, remove_shared
from trtx.media import Blob, MediaLimits, content_key, fetch
from trtx.worker.embedders import Embedder
from trtx.worker.embedding_cache import EmbeddingCache, Lease, TooLarge, Wanted
from trtx.worker.media_metrics import MediaMetrics
from trtx.worker.pictures import Picture
from trtx.worker.request import InvalidRequest

FETCHES = 32
"""Files that a worker fetches at a time: each may be as large as ``MediaLimits.max_media_bytes``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Pictures whose embeddings the engine has, until :meth:`close`."""

    pictures: tuple[Picture, ...]  # as they were asked for
    lease: Lease[Picture]

    def close(self) -> None:
        self.lease.release()


class Sight:
    """One worker's. ``identity``: model and processor options, by which keys of other models differ."""

    def __init__(
        self,
        config: VisionConfig,
        engine: Engine,
        embedder: Embedder,
        *,
        cache: EmbeddingCache[Picture],
        limits: MediaLimits,
        metrics: MediaMetrics,
        identity: tuple[str, str],
        bytes_at_most: int,
    ) -> None:
        self.config = config
        self._engine, self._embedder, self._cache = engine, embedder, cache
        self._limits, self._metrics, self._identity = limits, metrics, identity
        self._bytes_at_most = bytes_at_most
        self._fetches = asyncio.Semaphore(FETCHES)

    def check_count(self, count: int) -> None:
        """Raises InvalidRequest for more pictures than one request may bring."""
        if count > self._limits.max_images:
            raise InvalidRequest(f"the request brings {count} images, expected at most {self._limits.max_images}")

    async def look(self, urls: Sequence[str]) -> Seen:
        """Raises MediaError, InvalidRequest, or what no encoder could do. Nothing stays pinned where it is cancelled.

        Whether there is room in the context is known afterwards.
        """
        with self._metrics.timed("fetch"):
            fetched = await self._fetch_all(urls)
        wanted = [Wanted(key, self._bytes_at_most, self._maker(key, blob)) for key, blob in fetched]
        try:
            lease = await self._cache.lease(wanted)
        except TooLarge as error:
            raise InvalidRequest(f"the request's images make {error}; send fewer") from error
        try:
            found = await lease.embeddings()
        except BaseException:
            lease.release()
            raise
        return Seen(tuple(found[key] for key, _ in fetched), lease)

    async def _fetch_all(self, urls: Sequence[str]) -> list[tuple[bytes, Blob]]:
        """Keys and files, in order; the first that fails ends the others."""
        tasks = [asyncio.create_task(self._fetch(url)) for url in urls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, url: str) -> tuple[bytes, Blob]:
        async with self._fetches:
            blob = await fetch(url, self._limits)
        model, options = self._identity
        return await asyncio.to_thread(content_key, blob.data, model=model, options=options), blob

    def _maker(self, key: bytes, blob: Blob):  # type: ignore[no-untyped-def]
        async def make() -> tuple[Picture, int]:
            made = await self._embedder.embed(blob, key)
            try:
                picture = self._picture(key, made)
                with self._metrics.timed("put"):
                    await self._engine.put_embedding(key, made.rows)
            finally:
                remove_shared(made.rows)  # the engine has read it, or will not
            return picture, made.rows.nbytes

        return make

    def _picture(self, key: bytes, made: TowerOutput) -> Picture:
        rows, columns = made.rows.shape
        fixed, width = self.config.tokens_per_image, self.config.hidden_size * (1 + self.config.deepstack_levels)
        if columns != width or (fixed is not None and rows != fixed):
            raise RuntimeError(f"an embedding of shape {[rows, columns]} was made, expected {[fixed or rows, width]}")
        return Picture(key, rows, made.grid)

    async def close(self) -> None:
        await self._cache.close()
        await self._embedder.close()

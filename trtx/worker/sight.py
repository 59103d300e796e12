"""A request's pictures on their way into the engine: fetched, known by their content, encoded where they are new."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import TowerOutput, remove_shared
from trtx.media import THIS_PICTURE, Blob, HeldMedia, MediaError, MediaLimits, content_key, fetch
from trtx.worker.embedders import Embedder
from trtx.worker.embedding_cache import EmbeddingCache, Lease, NotMade, TooLarge, Wanted
from trtx.worker.media_metrics import MediaMetrics
from trtx.worker.pictures import Picture, check_placeholders, picture_urls
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


class Looking:
    """One request's pictures: looked at when somebody needs them, once, and let go of at its end."""

    def __init__(self, sight: Sight, urls: Sequence[str]) -> None:
        self._sight, self._urls = sight, urls
        self._seen: Seen | None = None

    def __len__(self) -> int:
        return len(self._urls)

    async def pictures(self) -> tuple[Picture, ...]:
        """The engine has the embeddings of them until :meth:`close`. Raises as :meth:`Sight.look` does."""
        if self._seen is None:
            self._seen = await self._sight.look(self._urls)
        return self._seen.pictures

    def close(self) -> None:
        if self._seen is not None:
            self._seen.close()


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
        reserved_bytes: int,
    ) -> None:
        self.config = config
        self._engine, self._embedder, self._cache = engine, embedder, cache
        self._limits, self._metrics, self._identity = limits, metrics, identity
        self._reserved_bytes = reserved_bytes
        self._fetches = asyncio.Semaphore(FETCHES)
        self._held = HeldMedia(limits.media_memory_bytes)

    def looking(self, wire: Mapping[str, Any]) -> Looking | None:
        """At the pictures of Dynamo's request, of which nothing is fetched yet; None: it has none, and no place for
        one. Raises InvalidRequest."""
        urls = picture_urls(wire)
        if len(urls) > self._limits.max_images:
            raise InvalidRequest(f"the request brings {len(urls)} images, expected at most {self._limits.max_images}")
        check_placeholders(wire.get("token_ids") or (), self.config.image_token_id, len(urls))
        return Looking(self, urls) if urls else None

    async def look(self, urls: Sequence[str]) -> Seen:
        """Raises MediaError, InvalidRequest, or NotMade of what no encoder could do. Nothing stays pinned then, or
        where it is cancelled.

        Whether there is room in the context is known afterwards.
        """
        fetched = await self._fetch_all(urls)
        wanted = [Wanted(key, self._reserved_bytes, self._maker(key, blob)) for key, blob in fetched]
        try:
            lease = await self._cache.lease(wanted)
        except TooLarge as error:
            raise InvalidRequest(f"the request's images make {error}; send fewer") from error
        try:
            found = await lease.embeddings()
        except NotMade as failed:
            lease.release()
            if isinstance(failed.error, MediaError):
                label = next(blob.label for key, blob in fetched if key == failed.key)
                raise failed.error.about(label) from failed
            raise
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
        with self._metrics.timed("fetch"):
            async with self._fetches:
                blob = await fetch(url, self._limits, held=self._held)
            model, options = self._identity
            return await asyncio.to_thread(content_key, blob.data, model=model, options=options), blob

    def _maker(self, key: bytes, blob: Blob) -> Callable[[], Awaitable[tuple[Picture, int]]]:
        async def make() -> tuple[Picture, int]:
            # Others join who know it by URLs of their own. ``blob`` stays here: as long as it does, its bytes count.
            made = await self._embedder.embed(Blob(blob.data, THIS_PICTURE), key)
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

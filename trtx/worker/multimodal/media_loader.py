"""Brings a request's media into the engine: fetches them, computes their cache keys, and encodes uncached ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import EmbeddingGone, EmbeddingUnreachable, TowerOutput, remove_shared
from trtx.media import THIS_PICTURE, Blob, HeldMedia, Kind, MediaError, MediaLimits, content_key
from trtx.media.fetch import fetch
from trtx.worker.background import all_or_cancel
from trtx.worker.multimodal.embedders import Embedder, NoEncoder
from trtx.worker.multimodal.embedding_cache import EmbeddingCache, EmbeddingLease, EmbeddingRequest, NotMade, TooLarge
from trtx.worker.multimodal.images import Picture, Sent, check_counts, check_placeholders, sent_media
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import room_of

logger = logging.getLogger(__name__)

FETCHES, READS = 32, 8
"""Maximum number of concurrent fetches: from servers, and from sources without a network (``data:``, ``file:``).

Each fetched file may be as large as ``MediaLimits.max_media_bytes``.
"""


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """The loaded media of a request. The engine keeps their embeddings until :meth:`close`."""

    pictures: tuple[Picture, ...]  # in the order of the request
    lease: EmbeddingLease[Picture]

    def close(self) -> None:
        self.lease.release()


class RequestMedia:
    """One request's media: loaded at the first call of :meth:`pictures`, released when the request ends."""

    def __init__(self, loader: MediaLoader, sent: Sequence[Sent], other_tokens: int) -> None:
        """``other_tokens``: number of prompt tokens that are not placeholders of ``sent``."""
        self._loader, self._sent, self._other_tokens = loader, sent, other_tokens
        self._loaded: LoadedMedia | None = None

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def config(self) -> VisionConfig:
        return self._loader.config

    async def pictures(self) -> tuple[Picture, ...]:
        """Loads the media, once. The engine keeps their embeddings until :meth:`close`.

        Raises the errors of :meth:`MediaLoader.load`.
        """
        if self._loaded is None:
            self._loaded = await self._loader.load(self._sent, self._other_tokens)
        return self._loaded.pictures

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()


class MediaLoader:
    """The loader of a worker's images and videos, whose embeddings go to the engine.

    The cache keys include ``model`` and the preprocessing ``options`` of the media kind.
    """

    def __init__(
        self,
        config: VisionConfig,
        engine: Engine,
        embedder: Embedder,
        *,
        cache: EmbeddingCache[Picture],
        limits: MediaLimits,
        metrics: MediaMetrics,
        model: str,
        options: Mapping[Kind, str],
        reserved_bytes: int,
    ) -> None:
        self.config = config
        self._engine, self._embedder, self._cache = engine, embedder, cache
        self._limits, self._metrics, self._model, self._options = limits, metrics, model, options
        self._reserved_bytes = reserved_bytes
        self._fetches, self._reads = asyncio.Semaphore(FETCHES), asyncio.Semaphore(READS)
        # Limits concurrent header reads to the number of decode processes. More would queue there, ahead of images that
        # already hold a reservation in the cache.
        self._counts = asyncio.Semaphore(limits.decode_processes)
        self._held = HeldMedia(limits.media_memory_bytes)

    def media_of(self, wire: Mapping[str, Any]) -> RequestMedia | None:
        """The media of Dynamo's request, not yet fetched; None if it has neither media nor placeholders.

        Raises InvalidRequest. If the model has a fixed number of rows per image, that includes images that exceed the
        context.
        """
        sent, token_ids = sent_media(wire, self.config), wire.get("token_ids") or ()
        check_counts(sent, self._limits)
        check_placeholders(token_ids, self.config, sent)
        other_tokens = len(token_ids) - len(sent)  # so far, each item has one placeholder in the prompt
        if sent and self.config.tokens_per_image is not None:
            room_of(other_tokens + len(sent) * self.config.tokens_per_image, self._engine.facts.context_length)
        return RequestMedia(self, sent, other_tokens) if sent else None

    async def load(self, sent: Sequence[Sent], other_tokens: int = 0) -> LoadedMedia:
        """Fetches and encodes ``sent``. ``other_tokens``: number of prompt tokens that are not their placeholders.

        Raises MediaError, InvalidRequest, or NotMade with an encoder's error. After an error or a cancellation, no
        embedding stays pinned in the cache.

        If there are several items, the images' headers are read first, to check that all fit the context before any is
        decoded. A single image or a video is checked after it was encoded.
        """
        fetched = await all_or_cancel(self._fetch(one) for one in sent)
        if len(fetched) > 1 and self.config.tokens_per_image is None:
            await self._check_room(fetched, other_tokens)
        wanted = [EmbeddingRequest(key, self._reserved_bytes, self._maker(key, blob)) for key, blob in fetched]
        try:
            lease = await self._cache.lease(wanted)
        except TooLarge as error:
            raise InvalidRequest(f"the request's media make {error}; send fewer") from error
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
        return LoadedMedia(tuple(found[key] for key, _ in fetched), lease)

    async def _check_room(self, fetched: Sequence[tuple[bytes, Blob]], other_tokens: int) -> None:
        """Raises InvalidRequest if the media exceed the context, and MediaError for an image with an invalid header."""
        blobs = dict(fetched)
        counts = await all_or_cancel(self._count(key, blob) for key, blob in blobs.items())
        rows = dict(zip(blobs, counts, strict=True))
        room_of(other_tokens + sum(rows[key] for key, _ in fetched), self._engine.facts.context_length)

    async def _count(self, key: bytes, blob: Blob) -> int:
        """Number of embedding rows of one item; 1, the minimum, if the number is unknown."""
        if (known := self._known_rows(key, blob)) is not None:
            return known  # not behind the semaphore: other requests' images may occupy it for seconds
        async with self._counts:
            if (known := self._known_rows(key, blob)) is not None:
                return known  # another request has encoded it in the meantime
            return await self._embedder.count(blob, key) or 1

    def _known_rows(self, key: bytes, blob: Blob) -> int | None:
        """Number of embedding rows of a cached item. For others: None for an image, 1 for a video."""
        if (picture := self._cache.held(key)) is not None:
            return picture.rows
        return None if blob.kind == "image" else 1

    async def _fetch(self, sent: Sent) -> tuple[bytes, Blob]:
        with self._metrics.timed("fetch"):
            async with self._fetches if sent.url[:4].lower() == "http" else self._reads:
                blob = await fetch(sent.url, self._limits, kind=sent.kind, held=self._held)
            options = self._options[sent.kind]
            return await asyncio.to_thread(content_key, blob.data, model=self._model, options=options), blob

    def _maker(self, key: bytes, blob: Blob) -> Callable[[], Awaitable[tuple[Picture, int]]]:
        async def make() -> tuple[Picture, int]:
            try:
                return await self._make(key, blob)
            except EmbeddingUnreachable as error:
                logger.warning("embeddings are passed in files from now on: %s", error)
                self._embedder.use_files()
            except EmbeddingGone as error:
                logger.warning("image %s is encoded again: %s", key.hex(), error)
            try:
                return await self._make(key, blob)
            except EmbeddingGone as error:
                logger.error(
                    "the embedding of image %s was lost twice between encoder and engine: %s", key.hex(), error
                )
                raise NoEncoder("the image's embedding was lost before the engine had read it; try again") from error

        return make

    async def _make(self, key: bytes, blob: Blob) -> tuple[Picture, int]:
        # The label in error messages is neutral, because other requests, which name the image by other URLs, may wait
        # for the same embedding. Keep ``blob`` referenced: its bytes count against the memory limit until it is freed.
        context = self._engine.facts.context_length
        made = await self._embedder.embed(Blob(blob.data, THIS_PICTURE, blob.kind), key, context)
        try:
            picture = self._picture(key, made)
            with self._metrics.timed("put"):
                await self._engine.put_embedding(key, made.rows)
        finally:
            remove_shared(made.rows)  # the engine has read the file, or has failed to
        return picture, made.rows.nbytes

    def _picture(self, key: bytes, made: TowerOutput) -> Picture:
        rows, columns = made.rows.shape
        fixed, width = self.config.tokens_per_image, self.config.columns
        if columns != width or (fixed is not None and rows != fixed):
            raise RuntimeError(f"an embedding of shape {[rows, columns]} was made, expected {[fixed or rows, width]}")
        return Picture(key, rows, made.grid, made.clip)

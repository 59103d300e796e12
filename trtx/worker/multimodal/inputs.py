"""A request's media on their way into the engine: fetched, known by their content, encoded where they are new."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import EmbeddingGone, EmbeddingUnreachable, TowerOutput, remove_shared
from trtx.media import THIS_PICTURE, Blob, HeldMedia, Kind, MediaError, MediaLimits, content_key, fetch
from trtx.worker.multimodal.embedders import Embedder, NoEncoder
from trtx.worker.multimodal.embedding_cache import EmbeddingCache, Lease, NotMade, TooLarge, Wanted
from trtx.worker.multimodal.images import Picture, Sent, check_counts, check_placeholders, sent_media
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import room_of

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

FETCHES, READS = 32, 8
"""Files that a worker fetches from servers at a time, and of others (``data:``, ``file:``), which wait for none.
Each may be as large as ``MediaLimits.max_media_bytes``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Pictures whose embeddings the engine has, until :meth:`close`."""

    pictures: tuple[Picture, ...]  # as they were asked for
    lease: Lease[Picture]

    def close(self) -> None:
        self.lease.release()


class Looking:
    """One request's pictures: looked at when somebody needs them, once, and let go of at its end."""

    def __init__(self, sight: Sight, sent: Sequence[Sent], beside: int) -> None:
        """``beside``: tokens of the prompt that stand for none of ``sent``."""
        self._sight, self._sent, self._beside = sight, sent, beside
        self._seen: Seen | None = None

    def __len__(self) -> int:
        return len(self._sent)

    async def pictures(self) -> tuple[Picture, ...]:
        """The engine has the embeddings of them until :meth:`close`. Raises as :meth:`Sight.look` does."""
        if self._seen is None:
            self._seen = await self._sight.look(self._sent, self._beside)
        return self._seen.pictures

    def close(self) -> None:
        if self._seen is not None:
            self._seen.close()


class Sight:
    """One worker's. ``model``, and of each kind the ``options`` that a file is prepared by: keys hold them."""

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
        # As many as are read at a time: the decoders' queue is for what the cache has made room for.
        self._counts = asyncio.Semaphore(limits.decode_processes)
        self._held = HeldMedia(limits.media_memory_bytes)

    def looking(self, wire: Mapping[str, Any]) -> Looking | None:
        """At the pictures of Dynamo's request, of which nothing is fetched yet; None: it has none, and no place for
        one. Raises InvalidRequest; for more than the context holds where every picture has as many rows."""
        sent, token_ids = sent_media(wire, self.config), wire.get("token_ids") or ()
        check_counts(sent, self._limits)
        check_placeholders(token_ids, self.config, sent)
        beside = len(token_ids) - len(sent)  # each has one placeholder in the prompt yet
        if sent and self.config.tokens_per_image is not None:
            room_of(beside + len(sent) * self.config.tokens_per_image, self._engine.facts.context_length)
        return Looking(self, sent, beside) if sent else None

    async def look(self, sent: Sequence[Sent], beside: int = 0) -> Seen:
        """``beside``: tokens of the prompt that stand for none of them.

        Raises MediaError, InvalidRequest, or NotMade of what no encoder could do. Nothing stays pinned then, or where
        it is cancelled.

        Whether there is room in the context for one of them, or for videos, is known afterwards; of several pictures
        it is counted by their headers, before any is decoded.
        """
        fetched = await self._fetch_all(sent)
        if len(fetched) > 1 and self.config.tokens_per_image is None:
            await self._check_room(fetched, beside)
        wanted = [Wanted(key, self._reserved_bytes, self._maker(key, blob)) for key, blob in fetched]
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
        return Seen(tuple(found[key] for key, _ in fetched), lease)

    async def _check_room(self, fetched: Sequence[tuple[bytes, Blob]], beside: int) -> None:
        """Raises InvalidRequest for more rows than the context holds, MediaError for what a header tells of."""
        blobs = dict(fetched)
        counts = await _all([self._count(key, blob) for key, blob in blobs.items()])
        rows = dict(zip(blobs, counts, strict=True))
        room_of(beside + sum(rows[key] for key, _ in fetched), self._engine.facts.context_length)

    async def _count(self, key: bytes, blob: Blob) -> int:
        """Rows of one; 1, which it has at least, where nobody knows yet."""
        if (known := self._known_rows(key, blob)) is not None:
            return known  # at once: others' pictures may be counted for seconds
        async with self._counts:
            if (known := self._known_rows(key, blob)) is not None:
                return known  # another request had it encoded meanwhile
            return await self._embedder.count(blob, key) or 1

    def _known_rows(self, key: bytes, blob: Blob) -> int | None:
        """What needs no counting; None: a picture that is not in the cache."""
        if (picture := self._cache.held(key)) is not None:
            return picture.rows
        return None if blob.kind == "image" else 1

    async def _fetch_all(self, sent: Sequence[Sent]) -> list[tuple[bytes, Blob]]:
        """Keys and files, in order; the first that fails ends the others."""
        return await _all([self._fetch(one) for one in sent])

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
                logger.warning("embeddings come in files from now on: %s", error)
                self._embedder.use_files()
            except EmbeddingGone as error:
                logger.warning("picture %s is encoded again: %s", key.hex(), error)
            try:
                return await self._make(key, blob)
            except EmbeddingGone as error:
                logger.error("picture %s was lost twice between encoder and engine: %s", key.hex(), error)
                raise NoEncoder(
                    "what encoders made of the picture was gone before the engine had it; try again"
                ) from error

        return make

    async def _make(self, key: bytes, blob: Blob) -> tuple[Picture, int]:
        # Others join who know it by URLs of their own. ``blob`` stays here: as long as it does, its bytes count.
        context = self._engine.facts.context_length
        made = await self._embedder.embed(Blob(blob.data, THIS_PICTURE, blob.kind), key, context)
        try:
            picture = self._picture(key, made)
            with self._metrics.timed("put"):
                await self._engine.put_embedding(key, made.rows)
        finally:
            remove_shared(made.rows)  # the engine has read it, or will not
        return picture, made.rows.nbytes

    def _picture(self, key: bytes, made: TowerOutput) -> Picture:
        rows, columns = made.rows.shape
        fixed, width = self.config.tokens_per_image, self.config.columns
        if columns != width or (fixed is not None and rows != fixed):
            raise RuntimeError(f"an embedding of shape {[rows, columns]} was made, expected {[fixed or rows, width]}")
        return Picture(key, rows, made.grid, made.clip)


async def _all(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """In order; the first that fails ends the others."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

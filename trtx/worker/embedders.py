"""From a picture's bytes to its embedding: by an encoder of this worker, or by encode workers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import (
    EmbeddingReader,
    SharedTensor,
    Start,
    TowerOutput,
    remove_shared,
    share,
)
from trtx.media import Blob, MediaError, MediaLimits, PicturePool, VideoRule
from trtx.worker import questions
from trtx.worker.media_metrics import MediaMetrics

logger = logging.getLogger(__name__)

ENCODE_SECONDS = 30.0
"""How long one encode worker may take with one picture, waiting for others included, before another is asked."""
DISTRUST_SECONDS = 15.0
"""How long one that did not answer is asked last: by then discovery has dropped what is dead or stopped."""


class NoEncoder(Exception):
    """Nobody could encode the picture: no fault of its own, and worth another try. ``status``: of HTTP."""

    status = 429


class Embedder(Protocol):
    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        """Raises MediaError about ``blob.label``, 413 for more than ``most_rows`` before anything is encoded;
        NoEncoder, or what an encoder failed with."""
        ...

    async def count(self, blob: Blob, key: bytes) -> int | None:
        """Rows that :meth:`embed` would make, where that is known before anything is decoded. Raises MediaError about
        ``blob.label``, as far as a header tells."""
        ...

    def use_files(self) -> None:
        """Nothing of what is made from now on stays on an encoder's device."""

    async def close(self) -> None: ...


class LocalEmbedder:
    """Decoding processes and a vision encoder, both started, of this worker. ``on_device``: what it makes may stay on
    the encoder's device."""

    def __init__(
        self,
        pool: PicturePool,
        encoder: Engine,
        config: VisionConfig,
        metrics: MediaMetrics,
        *,
        on_device: bool = True,
    ) -> None:
        self._pool, self._encoder, self._config, self._metrics = pool, encoder, config, metrics
        self._on_device = on_device

    def use_files(self) -> None:
        self._on_device = False

    @classmethod
    async def begin(
        cls,
        model: Path,
        config: Mapping[str, Any],
        start: Start,
        limits: MediaLimits,
        metrics: MediaMetrics,
        *,
        vision: VisionConfig,
    ) -> LocalEmbedder:
        """With an encoder of its own; takes seconds. Raises UsageError for a checkpoint whose pictures can't be
        prepared or encoded."""
        pool = PicturePool(model, limits, videos=video_rule(vision))
        await pool.start()
        try:
            return cls(pool, await asyncio.to_thread(start, model, config), vision, metrics)
        except BaseException:
            await pool.close()
            raise

    @property
    def is_alive(self) -> bool:
        """False once its encoder died."""
        return self._encoder.is_alive()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        if blob.kind == "embedding":
            return await self._given(blob)
        with self._metrics.timed("prepare"):
            prepared = await self._pool.prepare(blob)
        try:
            _check_rows(self._config, prepared.grid, most_rows, blob.label)
            with self._metrics.timed("encode"):
                made = await self._encoder.encode_pixels(prepared.pixels, prepared.grid, on_device=self._on_device)
            return replace(made, clip=prepared.clip)
        except ValueError as error:
            raise MediaError(422, f"{blob.label} can't be encoded: {error}") from error
        finally:
            remove_shared(prepared.pixels)

    async def count(self, blob: Blob, key: bytes) -> int | None:
        if blob.kind != "image" or self._config.tokens_per_image is not None:
            return self._config.tokens_per_image
        patches = await self._pool.patches(blob)
        return None if patches is None else patches // self._config.spatial_merge**2

    async def _given(self, blob: Blob) -> TowerOutput:
        """Made by the client: read, and checked against what the model would make."""
        config, dtype = self._config, self._encoder.facts.embedding_dtype
        assert dtype is not None, "an engine whose encoder takes pixels says its dtype"
        with self._metrics.timed("prepare"):
            given = await self._pool.embedding(blob, hidden=config.columns, dtype=dtype)
        try:
            return TowerOutput(given.rows, _checked_grid(config, given.rows.shape[0], given.grid, blob.label))
        except MediaError:
            remove_shared(given.rows)
            raise

    async def close(self) -> None:
        await self._pool.close()
        await asyncio.to_thread(self._encoder.shutdown)


def video_rule(config: VisionConfig) -> VideoRule | None:
    """How the model's processor takes videos; None: the model takes none."""
    if config.video_token_id is None:
        return None
    return "all" if config.tokens_per_second is None else "each"


def _check_rows(config: VisionConfig, patches: tuple[int, int, int] | None, most: int, label: str) -> None:
    """Raises MediaError 413 for pixels of which more rows would be made."""
    check_rows(0 if patches is None else math.prod(patches) // config.spatial_merge**2, most, label)


def check_rows(rows: int, most: int, label: str) -> None:
    """Raises MediaError 413 for a picture that takes more positions than the context holds."""
    if rows > most:
        raise MediaError(
            413, f"{label} makes {rows} tokens of the prompt, and the context holds {most}; send a smaller one"
        )


def _checked_grid(
    config: VisionConfig, rows: int, patches: tuple[int, int, int] | None, label: str
) -> tuple[int, int, int] | None:
    """The grid of an embedding's rows. Raises MediaError 422 where they are not as many as a picture of it has."""
    if config.tokens_per_image is not None:
        if rows != config.tokens_per_image or patches is not None:
            raise MediaError(
                422,
                f"{label} holds {rows} rows{'' if patches is None else ' and a grid_thw'}; expected "
                f"{config.tokens_per_image} without a grid_thw, as each image of this model has",
            )
        return None
    merge = config.spatial_merge
    if patches is None:
        raise MediaError(422, f"{label} holds no grid_thw; expected one, as this model's positions depend on it")
    time, height, width = patches
    if time != 1 or height % merge or width % merge or height * width != rows * merge**2:
        raise MediaError(
            422,
            f"{label} holds {rows} rows and a grid_thw of {time} x {height} x {width}; expected 1 x height x width in "
            f"patches, of which {merge} x {merge} are a row",
        )
    return 1, height // merge, width // merge


class StartedEmbedder:
    """A :class:`LocalEmbedder` that is begun when it is first needed, and anew when its encoder has died."""

    def __init__(self, begin: Callable[[], Awaitable[LocalEmbedder]]) -> None:
        self._begin = begin
        self._has_files = False
        self._beginning = asyncio.Lock()
        self._again = asyncio.Lock()
        self._begun: LocalEmbedder | None = None
        self._is_closed = False

    async def start(self) -> LocalEmbedder:
        """Idempotent. Raises as :meth:`LocalEmbedder.begin` does."""
        async with self._beginning:
            if self._begun is not None and not self._begun.is_alive:
                logger.error("the vision encoder of this worker died; another one is started")
                await self._end()
            if self._begun is None:
                self._begun = await self._begin()
                if self._has_files:
                    self._begun.use_files()
            return self._begun

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        """What was with an encoder that died is encoded once more, by the next one and one at a time: a picture that
        ends encoders takes others with it once, and never again. Raises NoEncoder where that one died too."""
        begun = await self.start()
        try:
            return await begun.embed(blob, key, most_rows)
        except Exception as error:
            if not self._died(begun, error):
                raise
        async with self._again:
            begun = await self.start()
            try:
                return await begun.embed(blob, key, most_rows)
            except Exception as error:
                if not self._died(begun, error):
                    raise
                raise NoEncoder(
                    "two vision encoders ended while they had the picture; try again, or another"
                ) from error

    async def count(self, blob: Blob, key: bytes) -> int | None:
        begun = await self.start()
        try:
            return await begun.count(blob, key)
        except Exception as error:
            if not self._died(begun, error):
                raise
            return None  # the next encoder tells, once it has it

    def _died(self, begun: LocalEmbedder, error: Exception) -> bool:
        """Whether ``error`` tells of the encoder's end, or of that of the pool beside it, and not of the picture."""
        is_the_pictures_own = isinstance(error, MediaError) and error.status != NoEncoder.status
        return not (is_the_pictures_own or begun.is_alive or self._is_closed)

    def use_files(self) -> None:
        self._has_files = True
        if self._begun is not None:
            self._begun.use_files()

    async def close(self) -> None:
        self._is_closed = True
        async with self._beginning:
            await self._end()

    async def _end(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            await begun.close()


class EncodeWorkers(Protocol):
    """The encode workers of a topology, as Dynamo's request plane knows them."""

    def ids(self) -> Sequence[int]:
        """Of those that are registered now."""
        ...

    def ask(self, worker_id: int, question: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        """Its ``encoder_result``. Raises anything where it did not answer."""
        ...


class RemoteEmbedder:
    """Asks the encode worker that :func:`preferred` says, the next one where it does not answer, then ``fallback``.
    One that did not answer is asked last for :data:`DISTRUST_SECONDS`, and not at all where there is a fallback.

    The picture travels in a file of the topology's own directory, and so does its embedding back: nothing of either
    passes the event loop.
    """

    def __init__(
        self,
        workers: EncodeWorkers,
        metrics: MediaMetrics,
        *,
        fallback: Embedder | None,
        seconds: float = ENCODE_SECONDS,
        share_bytes: Callable[[Any], SharedTensor] = share,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._metrics, self._fallback = workers, metrics, fallback
        self._seconds = seconds
        self._share = share_bytes
        self._clock = clock
        self._reader = EmbeddingReader()
        self._has_files = False
        self._distrusted: dict[int, float] = {}  # until when, by id

    def use_files(self) -> None:
        self._has_files = True
        if self._fallback is not None:
            self._fallback.use_files()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        async with self._in_file(blob) as picture:
            asked: set[int] = set()
            while found := self._worth_asking(asked):
                self._metrics.retries += bool(asked)
                worker = preferred(found, key)
                asked.add(worker)
                try:
                    with self._metrics.timed("remote"):
                        asked_for = questions.question(picture, key, blob.kind, most_rows, in_file=self._has_files)
                        made = await self._ask(worker, asked_for)
                except MediaError as error:
                    self._distrusted.pop(worker, None)
                    raise error.about(blob.label) from error
                except Exception as error:
                    self._distrusted[worker] = self._clock() + DISTRUST_SECONDS
                    logger.warning("encode worker %x did not encode picture %s: %r", worker, key.hex(), error)
                else:
                    self._distrusted.pop(worker, None)
                    return made
        if self._fallback is None:
            raise NoEncoder("no encode worker answered; try again once one is back")
        self._metrics.fallbacks += 1
        return await self._fallback.embed(blob, key, most_rows)

    async def count(self, blob: Blob, key: bytes) -> int | None:
        """Of whoever would encode it, who is asked once: what comes of it is no answer anybody waits for."""
        found = self._worth_asking(())
        if not found:
            return None if self._fallback is None else await self._fallback.count(blob, key)
        worker = preferred(found, key)
        async with self._in_file(blob) as picture:
            try:
                async with asyncio.timeout(self._seconds):
                    asked = questions.count_question(picture, key, blob.kind)
                    return questions.read_count(await self._workers.ask(worker, asked))
            except MediaError as error:
                raise error.about(blob.label) from error
            except Exception as error:
                self._distrusted[worker] = self._clock() + DISTRUST_SECONDS
                logger.warning("encode worker %x did not count the rows of picture %s: %r", worker, key.hex(), error)
                return None

    @asynccontextmanager
    async def _in_file(self, blob: Blob) -> AsyncIterator[SharedTensor]:
        """For as long as the block takes. A thread that writes goes on where its caller was cancelled: what it wrote
        is removed then too."""
        data = np.frombuffer(blob.data, np.uint8)
        writing = asyncio.get_running_loop().run_in_executor(None, self._share, data)
        try:
            yield await asyncio.shield(writing)
        finally:
            if writing.done():
                _remove_written(writing)
            else:
                writing.add_done_callback(_remove_written)

    def _worth_asking(self, asked: Collection[int]) -> Sequence[int]:
        """Who may be asked next; those of whom nothing is known against them first."""
        ids = self._workers.ids()
        now = self._clock()
        self._distrusted = {one: until for one, until in self._distrusted.items() if until > now and one in ids}
        left = [one for one in ids if one not in asked]
        trusted = [one for one in left if one not in self._distrusted]
        return trusted if trusted or self._fallback is not None else left

    async def _ask(self, worker: int, asked: Mapping[str, Any]) -> TowerOutput:
        async with asyncio.timeout(self._seconds):
            handle = questions.read_answer(await self._workers.ask(worker, asked), bytes.fromhex(asked["key"]))
            return TowerOutput(self._reader.read(handle), handle.grid, handle.clip)

    async def close(self) -> None:
        if self._fallback is not None:
            await self._fallback.close()


def _remove_written(writing: asyncio.Future[SharedTensor]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        remove_shared(writing.result())


def preferred(workers: Iterable[int], key: bytes) -> int:
    """By rendezvous hashing: all who ask take the same worker for a picture, so that it is encoded once and found in
    that worker's cache, and each worker gets as many pictures as another. Where one goes or comes, only its own move.
    """
    return max(workers, key=lambda one: (hashlib.blake2b(b"%d" % one, key=key, digest_size=8).digest(), one))

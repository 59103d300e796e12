"""From a picture's bytes to its embedding: by an encoder of this worker, or by encode workers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import Engine
from trtx.engine.api import (
    Start,
    TowerOutput,
    remove_shared,
)
from trtx.errors import LaunchError
from trtx.media import Blob, MediaError, MediaLimits, PicturePool, VideoRule
from trtx.worker.multimodal.media_metrics import MediaMetrics

logger = logging.getLogger(__name__)


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
        begun = await self._for_a_picture()
        try:
            return await begun.embed(blob, key, most_rows)
        except Exception as error:
            if not self._died(begun, error):
                raise
        async with self._again:
            begun = await self._for_a_picture()
            try:
                return await begun.embed(blob, key, most_rows)
            except Exception as error:
                if not self._died(begun, error):
                    raise
                raise NoEncoder(
                    "two vision encoders ended while they had the picture; try again, or another"
                ) from error

    async def count(self, blob: Blob, key: bytes) -> int | None:
        begun = await self._for_a_picture()
        try:
            return await begun.count(blob, key)
        except Exception as error:
            if not self._died(begun, error):
                raise
            return None  # the next encoder tells, once it has it

    async def _for_a_picture(self) -> LocalEmbedder:
        """Raises NoEncoder where no process comes up: no fault of the picture's, nor of the engine beside it."""
        try:
            return await self.start()
        except LaunchError as error:
            logger.error("no vision encoder can be started: %s", error)
            raise NoEncoder("no vision encoder could be started for the picture; try again") from error

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

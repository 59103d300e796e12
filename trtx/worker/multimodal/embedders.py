"""Turns an image file into its embedding, with an encoder of this worker or with encode workers."""

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
    """No encoder was available for the image.

    The image is not at fault, so the client may retry. ``status`` is the HTTP status.
    """

    status = 429


class Embedder(Protocol):
    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        """The embedding of ``blob``.

        Raises MediaError about ``blob.label`` (413 for more than ``most_rows`` rows, before anything is encoded),
        NoEncoder, or the encoder's own error.
        """
        ...

    async def count(self, blob: Blob, key: bytes) -> int | None:
        """Number of rows that :meth:`embed` would make, or None if that is unknown before decoding.

        Raises MediaError about ``blob.label`` for what the file's header shows.
        """
        ...

    def use_files(self) -> None:
        """From now on, returns embeddings in files and leaves none on an encoder's device."""

    async def close(self) -> None: ...


class LocalEmbedder:
    """Decoding processes and a vision encoder of this worker, both started.

    ``on_device``: whether embeddings may stay on the encoder's device.
    """

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
        """Starts a decoding pool and an encoder; takes seconds.

        Raises UsageError if images of this checkpoint can't be preprocessed or encoded.
        """
        pool = PicturePool(model, limits, videos=video_rule(vision))
        await pool.start()
        try:
            return cls(pool, await asyncio.to_thread(start, model, config), vision, metrics)
        except BaseException:
            await pool.close()
            raise

    @property
    def is_alive(self) -> bool:
        """False once the encoder has died."""
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
        """Reads an embedding that the client sent, and checks it against the shape that the model would make."""
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
    """How the model's processor samples videos; None if the model takes no videos."""
    if config.video_token_id is None:
        return None
    return "all" if config.tokens_per_second is None else "each"


def _check_rows(config: VisionConfig, patches: tuple[int, int, int] | None, most: int, label: str) -> None:
    """Raises MediaError 413 if the pixels would make more than ``most`` rows."""
    check_rows(0 if patches is None else math.prod(patches) // config.spatial_merge**2, most, label)


def check_rows(rows: int, most: int, label: str) -> None:
    """Raises MediaError 413 if an image takes more prompt positions than the context holds."""
    if rows > most:
        raise MediaError(
            413, f"{label} makes {rows} tokens of the prompt, and the context holds {most}; send a smaller one"
        )


def _checked_grid(
    config: VisionConfig, rows: int, patches: tuple[int, int, int] | None, label: str
) -> tuple[int, int, int] | None:
    """The grid of an embedding's rows, in merged patches; None for models with a fixed number of tokens per image.

    Raises MediaError 422 if the number of rows does not match the grid or the model.
    """
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
            f"patches, where {merge} x {merge} patches make one row",
        )
    return 1, height // merge, width // merge


class StartedEmbedder:
    """A :class:`LocalEmbedder` that starts at its first use, and restarts after its encoder has died."""

    def __init__(self, begin: Callable[[], Awaitable[LocalEmbedder]]) -> None:
        self._begin = begin
        self._has_files = False
        self._beginning = asyncio.Lock()
        self._again = asyncio.Lock()
        self._begun: LocalEmbedder | None = None
        self._is_closed = False

    async def start(self) -> LocalEmbedder:
        """Starts the embedder if it is not running. Raises the same errors as :meth:`LocalEmbedder.begin`."""
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
        """Encodes the image, and retries once with a new encoder if the encoder died.

        Retries run one at a time, so that an image that crashes encoders makes the images of other requests fail only
        once. Raises NoEncoder if the second encoder died too.
        """
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
                    "two vision encoders died while they encoded this image; try again, or send another image"
                ) from error

    async def count(self, blob: Blob, key: bytes) -> int | None:
        begun = await self._for_a_picture()
        try:
            return await begun.count(blob, key)
        except Exception as error:
            if not self._died(begun, error):
                raise
            return None  # unknown until the next encoder has encoded it

    async def _for_a_picture(self) -> LocalEmbedder:
        """The running embedder.

        Raises NoEncoder if no encoder can be started: neither the image nor the engine is at fault.
        """
        try:
            return await self.start()
        except LaunchError as error:
            logger.error("no vision encoder can be started: %s", error)
            raise NoEncoder("the worker could not start a vision encoder for this image; try again") from error

    def _died(self, begun: LocalEmbedder, error: Exception) -> bool:
        """Whether ``error`` comes from the death of the encoder or of the decoding pool, and not from the image."""
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

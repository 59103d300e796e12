"""Decodes a request's images to pixels for engines that preprocess images themselves, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trtx.engine import Engine
from trtx.media import Blob, MediaError, PicturePool
from trtx.worker.multimodal.embedders import check_rows
from trtx.worker.multimodal.media_metrics import MediaMetrics, Stage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Decoding:
    """Decodes with ``pool``, which it starts at the first image. The pool's creator closes it."""

    def __init__(self, pool: PicturePool, metrics: MediaMetrics) -> None:
        self._pool, self._metrics = pool, metrics
        self._starting: asyncio.Task[None] | None = None

    async def for_engine(self, blob: Blob, engine: Engine, most_rows: int) -> npt.NDArray[np.uint8]:
        """Like :meth:`rgb`, for an image that ``engine`` accepts.

        Raises MediaError: 422 if the model's processor refuses the image's shape, 413 if the image makes more than
        ``most_rows`` embedding rows. Both are checked before anything is encoded.
        """
        picture = await self.rgb(blob)
        try:
            rows = await asyncio.to_thread(engine.rows_of, picture)
        except ValueError as error:
            height, width, _ = picture.shape
            text = f"{blob.label} has {width}x{height} pixels, which this model can't take: {error}"
            raise MediaError(422, text) from error
        if rows is not None:
            check_rows(rows, most_rows, blob.label)
        return picture

    async def rgb(self, blob: Blob) -> npt.NDArray[np.uint8]:
        """The image as uint8 ``[height, width, 3]``. Raises MediaError."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._pool.start())
        await asyncio.shield(self._starting)
        with self._metrics.timed("prepare"):
            return await self._pool.rgb(blob)

    @contextmanager
    def timed(self, stage: Stage, pictures: int) -> Iterator[None]:
        """Times one call that processes several images, and counts each of them if the call succeeds."""
        with self._metrics.timed(stage):
            yield
        self._metrics.passed(stage, pictures - 1)

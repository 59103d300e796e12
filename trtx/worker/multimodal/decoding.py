"""Pictures of requests to pixels, for engines that prepare them themselves; counted as pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from trtx.engine import Engine
from trtx.media import Blob, MediaError, PicturePool
from trtx.worker.multimodal.embedders import check_rows
from trtx.worker.multimodal.media_metrics import MediaMetrics, Stage


class Decoding:
    """``pool`` is started when the first picture comes, and closed by whoever made it."""

    def __init__(self, pool: PicturePool, metrics: MediaMetrics) -> None:
        self._pool, self._metrics = pool, metrics
        self._starting: asyncio.Task[None] | None = None

    async def for_engine(self, blob: Blob, engine: Engine, most_rows: int) -> npt.NDArray[np.uint8]:
        """As :meth:`rgb`, of a picture that ``engine`` takes. Raises MediaError: 422 for a shape that the model's
        processor refuses, 413 for one that makes more than ``most_rows``, before anything is encoded."""
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
        """``[height, width, 3]``. Raises MediaError."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._pool.start())
        await asyncio.shield(self._starting)
        with self._metrics.timed("prepare"):
            return await self._pool.rgb(blob)

    @contextmanager
    def timed(self, stage: Stage, pictures: int) -> Iterator[None]:
        """One bracket around several pictures, each of which passed."""
        with self._metrics.timed(stage):
            yield
        self._metrics.passed(stage, pictures - 1)

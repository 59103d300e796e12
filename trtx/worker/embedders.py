"""From a picture's bytes to its embedding: by an encoder of this worker, or by encode workers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from trtx.engine import Engine
from trtx.engine.api import SharedTensor, Start, TowerOutput, remove_shared, share
from trtx.media import Blob, MediaError, MediaLimits, PicturePool
from trtx.worker.media_metrics import MediaMetrics

logger = logging.getLogger(__name__)

ENCODE_SECONDS = 30.0
"""How long one encode worker may take with one picture, waiting for others included, before another is asked."""


class NoEncoder(Exception):
    """Nobody could encode the picture: no fault of its own."""


class Embedder(Protocol):
    async def embed(self, blob: Blob, key: bytes) -> TowerOutput:
        """Raises MediaError for a picture that is none, NoEncoder, or what an encoder failed with."""
        ...

    async def close(self) -> None: ...


class LocalEmbedder:
    """Decoding processes and a vision encoder beside this worker. Started with :meth:`start`, or when first needed."""

    def __init__(
        self, model: Path, config: Mapping[str, Any], start: Start, limits: MediaLimits, metrics: MediaMetrics
    ) -> None:
        self._model, self._config, self._start_encoder = model, config, start
        self._limits, self._metrics = limits, metrics
        self._starting = asyncio.Lock()
        self._parts: tuple[PicturePool, Engine] | None = None
        self._exit = AsyncExitStack()

    async def start(self) -> tuple[PicturePool, Engine]:
        """Idempotent, seconds. Raises UsageError for a checkpoint whose pictures can't be prepared or encoded."""
        async with self._starting:
            if self._parts is None:
                async with AsyncExitStack() as parts:
                    pool = await parts.enter_async_context(PicturePool(self._model, self._limits))
                    encoder = await asyncio.to_thread(self._start_encoder, self._model, self._config)
                    parts.push_async_callback(asyncio.to_thread, encoder.shutdown)
                    self._exit = parts.pop_all()
                self._parts = pool, encoder
            return self._parts

    async def embed(self, blob: Blob, key: bytes) -> TowerOutput:
        pool, encoder = await self.start()
        with self._metrics.timed("prepare"):
            prepared = await pool.prepare(blob)
        try:
            with self._metrics.timed("encode"):
                return await encoder.encode_pixels(prepared.pixels, prepared.grid)
        finally:
            remove_shared(prepared.pixels)

    async def close(self) -> None:
        async with self._starting:
            self._parts = None
            await self._exit.aclose()


class EncodeWorkers(Protocol):
    """The encode workers of a topology, as Dynamo's request plane knows them."""

    def ids(self) -> Sequence[int]:
        """Of those that are registered now."""
        ...

    def ask(self, worker_id: int, question: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        """Its ``encoder_result``. Raises anything where it did not answer."""
        ...


class RemoteEmbedder:
    """Asks the encode worker that has the least to do, another one where it does not answer, then ``fallback``.

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
    ) -> None:
        self._workers, self._metrics, self._fallback = workers, metrics, fallback
        self._seconds = seconds
        self._share = share_bytes
        self._open: Counter[int] = Counter()  # questions that each worker has not answered

    async def embed(self, blob: Blob, key: bytes) -> TowerOutput:
        picture = await asyncio.to_thread(self._share, np.frombuffer(blob.data, np.uint8))
        try:
            asked: set[int] = set()
            while found := [one for one in self._workers.ids() if one not in asked]:
                self._metrics.retries += bool(asked)
                worker = min(found, key=lambda one: self._open[one])
                asked.add(worker)
                try:
                    with self._metrics.timed("remote"):
                        return await self._ask(worker, question(picture, key, blob.label))
                except (MediaError, asyncio.CancelledError):
                    raise
                except Exception as error:
                    logger.warning("encode worker %x did not encode %s: %r", worker, blob.label, error)
        finally:
            remove_shared(picture)
        if self._fallback is None:
            raise NoEncoder("no encode worker answered; try again once one is back")
        self._metrics.fallbacks += 1
        return await self._fallback.embed(blob, key)

    async def _ask(self, worker: int, asked: Mapping[str, Any]) -> TowerOutput:
        self._open[worker] += 1
        try:
            async with asyncio.timeout(self._seconds):
                return read_answer(await self._workers.ask(worker, asked))
        finally:
            self._open[worker] -= 1

    async def close(self) -> None:
        if self._fallback is not None:
            await self._fallback.close()


# --- what the two ends say to each other, as JSON ---


def question(picture: SharedTensor, key: bytes, label: str) -> dict[str, Any]:
    """``picture``: uint8, the bytes of its file."""
    return {"picture": msgspec.to_builtins(picture), "key": key.hex(), "label": label}


def read_question(asked: Any) -> tuple[SharedTensor, bytes, str]:
    """Raises ValueError for what is no question."""
    if not isinstance(asked, Mapping):
        raise ValueError("expected picture, key and label")
    try:
        picture = msgspec.convert(asked.get("picture"), SharedTensor)
        return picture, bytes.fromhex(str(asked.get("key"))), str(asked.get("label"))
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"expected picture, key and label: {error}") from error


def answer(output: TowerOutput) -> dict[str, Any]:
    return {"rows": msgspec.to_builtins(output.rows), "grid": output.grid}


def refusal(error: MediaError) -> dict[str, Any]:
    """A fault of the picture's own: another encode worker would find it too."""
    return {"error": str(error), "status": error.status}


def read_answer(answered: Mapping[str, Any]) -> TowerOutput:
    """Raises MediaError for a picture that was refused, ValueError for what is no answer."""
    if "error" in answered:
        raise MediaError(answered["status"], answered["error"])
    try:
        grid = answered.get("grid")
        rows = msgspec.convert(answered["rows"], SharedTensor)
        return TowerOutput(rows, None if grid is None else msgspec.convert(grid, tuple[int, int, int]))
    except (KeyError, msgspec.ValidationError) as error:
        raise ValueError(f"an encode worker's answer can't be read ({error})") from error

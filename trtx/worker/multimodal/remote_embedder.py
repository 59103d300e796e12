"""Gets an image's embedding from encode workers: selects the worker, its timeout, and the next one if it fails."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from trtx.engine.api import EmbeddingReader, SharedTensor, TowerOutput, share
from trtx.media import Blob, MediaError, MediaLimits, decode_seconds
from trtx.worker.multimodal import encode_rpc as questions
from trtx.worker.multimodal.embedders import Embedder, NoEncoder
from trtx.worker.multimodal.encode_contract import OtherRelease
from trtx.worker.multimodal.media_file import file_of
from trtx.worker.multimodal.media_metrics import MediaMetrics

logger = logging.getLogger(__name__)

ENCODE_SECONDS = 30.0
"""Time that an encode worker may take for an image in addition to its decoding, including waiting for other images."""
DISTRUST_SECONDS = 15.0
"""Time for which an encode worker that did not answer is tried last; discovery drops dead workers sooner."""


def encode_seconds(limits: MediaLimits, pictures: int = 1) -> float:
    """Timeout of one encode worker for a request, after which another worker is asked.

    Includes the time limit of decoding, which ends by itself with a reason: giving up earlier would repeat the decoding
    elsewhere, on cores that are busy already.
    """
    return pictures * decode_seconds(limits) + ENCODE_SECONDS


class EncodeWorkers(Protocol):
    """The encode workers of a topology on Dynamo's request plane."""

    def ids(self) -> Sequence[int]:
        """Ids of the workers that are registered now."""
        ...

    def ask(self, worker_id: int, question: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        """The worker's ``encoder_result``. Raises any exception if it did not answer."""
        ...


class RemoteEmbedder:
    """Gets embeddings from encode workers.

    Asks the worker that :func:`preferred` selects, then the next ones if it does not answer, then ``fallback``. A
    worker that did not answer is asked last for :data:`DISTRUST_SECONDS`, or not at all if there is a fallback.

    The image travels in a file in the topology's own directory, and so does its embedding on the way back; the bytes of
    neither pass through the event loop.
    """

    def __init__(
        self,
        workers: EncodeWorkers,
        metrics: MediaMetrics,
        *,
        fallback: Embedder | None,
        seconds: float,
        share_bytes: Callable[[Any], SharedTensor] = share,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._metrics, self._fallback = workers, metrics, fallback
        self._seconds = seconds
        self._share = share_bytes
        self._clock = clock
        self._reader = EmbeddingReader()
        self._has_files = False
        self._distrusted: dict[int, float] = {}  # worker id -> time until which it is asked last

    def use_files(self) -> None:
        self._has_files = True
        if self._fallback is not None:
            self._fallback.use_files()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        async with file_of(blob, self._share) as picture:
            asked: set[int] = set()
            because = ""
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
                    logger.warning("encode worker %x did not encode image %s: %r", worker, key.hex(), error)
                    because = f" ({error})" if isinstance(error, OtherRelease) else because
                else:
                    self._distrusted.pop(worker, None)
                    return made
        if self._fallback is None:
            raise NoEncoder(f"no encode worker answered{because}; try again once one is back")
        self._metrics.fallbacks += 1
        return await self._fallback.embed(blob, key, most_rows)

    async def count(self, blob: Blob, key: bytes) -> int | None:
        """The row count from the worker that would encode the image; None if it does not answer.

        Only one worker is asked: the count only serves an early check, so it is not worth a retry.
        """
        found = self._worth_asking(())
        if not found:
            return None if self._fallback is None else await self._fallback.count(blob, key)
        worker = preferred(found, key)
        async with file_of(blob, self._share) as picture:
            try:
                async with asyncio.timeout(self._seconds):
                    asked = questions.count_question(picture, key, blob.kind)
                    return questions.read_count(await self._workers.ask(worker, asked))
            except MediaError as error:
                raise error.about(blob.label) from error
            except Exception as error:
                self._distrusted[worker] = self._clock() + DISTRUST_SECONDS
                logger.warning("encode worker %x did not count the rows of image %s: %r", worker, key.hex(), error)
                return None

    def _worth_asking(self, asked: Collection[int]) -> Sequence[int]:
        """Ids of the workers to choose from next: the trusted ones. If there are none and no fallback, the distrusted
        ones.
        """
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


def preferred(workers: Iterable[int], key: bytes) -> int:
    """The worker for an image, by rendezvous hashing.

    All requesters choose the same worker, so an image is encoded once and found in that worker's cache, and the images
    are spread evenly over the workers. If a worker comes or goes, only its own images move.
    """
    return max(workers, key=lambda one: (hashlib.blake2b(b"%d" % one, key=key, digest_size=8).digest(), one))

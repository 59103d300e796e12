"""The encode role for engines that take embeddings (the torch engine): encodes images that other workers send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo.common.backend.multimodal import encoder_terminal_chunk

from trtx.engine.api import (
    EmbeddingExports,
    EmbeddingHandle,
    SharedTensor,
    TowerOutput,
    lend,
    read_shared,
    remove_shared,
)
from trtx.media import THIS_PICTURE, Blob, Kind, MediaError, Stopping
from trtx.worker.multimodal.embedders import Embedder
from trtx.worker.multimodal.embedding_cache import EmbeddingCache, EmbeddingRequest, NotMade, TooLarge
from trtx.worker.multimodal.encode_contract import OtherRelease
from trtx.worker.multimodal.encode_endpoint import ASKED
from trtx.worker.multimodal.encode_rpc import answer, count, read_question, refusal, wants_count, wants_file
from trtx.worker.requests.chunks import Chunk
from trtx.worker.requests.invalid_request import InvalidRequest


class EmbeddingEncoder:
    """Serves encode requests with ``embedder``. Keeps the embeddings in ``cache``, which owns their files.

    A requester gets a second hard link to a file, under a lease of ``exports``, so an embedding whose requester has
    disconnected does not leak. ``in_files`` serves requesters that can't read what ``embedder`` leaves on its device;
    None if it leaves nothing there.
    """

    def __init__(
        self,
        embedder: Embedder,
        cache: EmbeddingCache[TowerOutput],
        reserved_bytes: int,
        exports: EmbeddingExports,
        *,
        in_files: Embedder | None = None,
    ) -> None:
        self._in_files = in_files
        self._embedder, self._cache, self._reserved_bytes, self._exports = embedder, cache, reserved_bytes, exports

    async def encode(self, wire: Mapping[str, Any], *, is_wanted: Callable[[], bool] = lambda: True) -> Chunk:
        """The terminal chunk, with the answer in ``encoder_result``.

        Raises InvalidRequest for anything but an encode request from a worker, such as Dynamo's own requests.
        ``is_wanted`` returns False once the requester has disconnected and will not remove the file.
        """
        asked = (wire.get("extra_args") or {}).get(ASKED)
        try:
            picture, key, kind, most_rows = read_question(asked)
        except (ValueError, OtherRelease) as error:
            raise InvalidRequest(f"encode workers only serve other trtx workers: {error}") from error
        try:
            if wants_count(asked):
                blob = Blob(await asyncio.to_thread(read_shared, picture), THIS_PICTURE, kind)
                return _chunk(count(await self._embedder.count(blob, key)))
            handle = await self._encode(picture, key, kind, most_rows, in_file=wants_file(asked))
            if not is_wanted() and handle.path is not None:
                Path(handle.path).unlink(missing_ok=True)  # this ends the lease
            answered = answer(handle)
        except Stopping:
            raise  # the requester then asks another encode worker
        except MediaError as error:
            answered = refusal(error)
        except NotMade as failed:
            if isinstance(failed.error, Stopping) or not isinstance(failed.error, MediaError):
                raise
            answered = refusal(failed.error)
        return _chunk(answered)

    async def _encode(
        self, picture: SharedTensor, key: bytes, kind: Kind, most_rows: int, *, in_file: bool
    ) -> EmbeddingHandle:
        embedder, kept_as = self._embedder, key
        if in_file and self._in_files is not None:
            embedder, kept_as = self._in_files, key + b"in a file"

        async def make() -> tuple[TowerOutput, int]:
            blob = Blob(await asyncio.to_thread(read_shared, picture), THIS_PICTURE, kind)
            made = await embedder.embed(blob, key, most_rows)
            return made, made.rows.nbytes

        try:
            lease = await self._cache.lease([EmbeddingRequest(kept_as, self._reserved_bytes, make)])
        except TooLarge as error:
            raise MediaError(413, f"{THIS_PICTURE} makes a larger embedding than this worker holds: {error}") from error
        try:
            held = (await lease.embeddings())[kept_as]
            return self._exports.offer(key, lend(held.rows), held.grid, held.clip)
        finally:
            lease.release()


def _chunk(answered: dict[str, Any]) -> Chunk:
    chunk: Chunk = dict(encoder_terminal_chunk(answered))
    return chunk


def discard(key: bytes, held: TowerOutput) -> None:
    """Frees an embedding that leaves the cache."""
    remove_shared(held.rows)

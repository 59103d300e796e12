"""Prompts with images for an encoder: from TensorRT-LLM's inputs to embedding handles.

It prepares images, has the encoder encode them, and leases the embeddings.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trtx.config.media import MediaLimits
from trtx.ipc.shared_tensor import remove_shared
from trtx.media import Blob, MediaError, PicturePool, content_key, processor_options
from trtx.torch_engine.embeddings import EmbeddingExports, NoRoom
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.encoded import Embedding, PreparedPicture, discard
from trtx.torch_engine.llmapi.picture_inputs import pictures_of, png_of
from trtx.torch_engine.llmapi.request_errors import RequestError, RequestFailed

_KEY_NUMBERS = struct.Struct(">8i")  # key as numbers of TensorRT-LLM's ``multimodal_hashes``


class EncoderOutput:
    """Result of one prompt: await it, or block on ``result``.

    It has the part of TensorRT-LLM's ``RequestOutput`` that an encoder fills in.
    """

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], end: Future[DisaggregatedParams]) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs: list[Any] = []  # empty: an encoder generates nothing
        self._end = end

    @property
    def finished(self) -> bool:
        return self._end.done()

    @property
    def disaggregated_params(self) -> DisaggregatedParams | None:
        """``multimodal_embedding_handles``, one for each image, and ``multimodal_hashes``; None before the end.

        Raises the request's error.
        """
        return self._end.result() if self._end.done() else None

    def abort(self) -> None:
        """Ends the request with CancelledError, unless it has ended already."""
        self._end.cancel()

    def result(self, timeout: float | None = None) -> EncoderOutput:
        """Blocks until the end.

        Raises RequestError if the request failed, RuntimeError if the encoder died, TimeoutError after ``timeout``
        seconds.
        """
        self._end.result(timeout)
        return self

    async def aresult(self) -> EncoderOutput:
        await asyncio.wrap_future(self._end)
        return self

    def __await__(self) -> Generator[Any, None, EncoderOutput]:
        return self.aresult().__await__()


class EncoderRequests:
    """An event loop in its own thread, with the processes that decode and prepare images.

    ``encode``: function from prepared images to embeddings. Raises UsageError for a checkpoint without a usable image
    processor.
    """

    def __init__(
        self,
        model_dir: Path,
        encode: Callable[[Sequence[PreparedPicture]], Awaitable[list[Embedding]]],
    ) -> None:
        self._encode = encode
        self._model = str(model_dir.resolve())
        self._options = processor_options(model_dir)
        self._exports = EmbeddingExports()
        self._open: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="encoder-requests", daemon=True)
        self._thread.start()
        self._pool = PicturePool(model_dir, MediaLimits())
        try:
            self._run(self._pool.start()).result()
        except BaseException:
            self._stop()
            raise

    @property
    def exports(self) -> EmbeddingExports:
        return self._exports

    def submit(self, inputs: Any) -> EncoderOutput:
        """Starts a request from any thread. Raises RequestError for refused inputs."""
        pictures = pictures_of(inputs)
        prompt, token_ids = inputs.get("prompt"), inputs.get("prompt_token_ids")
        return EncoderOutput(prompt, list(token_ids or ()), self._run(self._answer(pictures)))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _answer(self, pictures: Sequence[Any]) -> DisaggregatedParams:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return self._offered(await self._embedded(pictures))
        finally:
            self._open.discard(task)

    async def _embedded(self, pictures: Sequence[Any]) -> list[Embedding]:
        asked = [asyncio.ensure_future(self._prepare(one, f"image {at}")) for at, one in enumerate(pictures)]
        try:
            ends = await asyncio.gather(*asked, return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end
            return await self._encode([end for end in ends if isinstance(end, PreparedPicture)])
        finally:
            for one in asked:
                if one.done() and not one.cancelled() and one.exception() is None:
                    remove_shared(one.result().pixels)

    def _offered(self, embeddings: Sequence[Embedding]) -> DisaggregatedParams:
        handles = []
        for index, one in enumerate(embeddings):
            try:
                handles.append(self._exports.offer(one.key, one.tensor, one.grid).to_dict())
            except NoRoom as error:
                discard(embeddings[index:])  # earlier ones end at their deadline
                raise RequestFailed(str(error)) from error
        return DisaggregatedParams(
            multimodal_embedding_handles=handles,
            multimodal_hashes=[list(_KEY_NUMBERS.unpack(one.key)) for one in embeddings],
        )

    async def _prepare(self, picture: Any, label: str) -> PreparedPicture:
        data = await asyncio.to_thread(png_of, picture)
        key = await asyncio.to_thread(content_key, data, model=self._model, options=self._options)
        try:
            found = await self._pool.prepare(Blob(data, label))
        except MediaError as error:
            raise RequestError(str(error)) from error
        return PreparedPicture(key, found.pixels, found.grid)

    def close(self) -> None:
        """Cancels open requests, which end with CancelledError, and ends every lease."""
        self._run(self._cancel_all()).result()
        self._run(self._pool.close()).result()
        self._stop()

    async def _cancel_all(self) -> None:
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._exports.close()

"""Brings a request's images into an engine that preprocesses them itself: fetches, decodes and passes them on.

No embeddings are cached here: the embeddings that an encode worker of such an engine makes can be read only once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from trtx.engine import Engine
from trtx.engine.api import PicturePrompt, ReadyPrompt, SharedTensor, share
from trtx.media import Blob, HeldMedia, MediaLimits
from trtx.media.fetch import fetch
from trtx.text import Tokenizer
from trtx.worker.background import all_or_cancel
from trtx.worker.multimodal import handle_encoder
from trtx.worker.multimodal.decoding import Decoding
from trtx.worker.multimodal.embedders import NoEncoder
from trtx.worker.multimodal.images import Placeholders, Sent, check_counts, check_placeholders, sent_media
from trtx.worker.multimodal.media_file import file_of
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.remote_embedder import EncodeWorkers, encode_seconds
from trtx.worker.requests.invalid_request import InvalidRequest

logger = logging.getLogger(__name__)

_NO_TOWER = "TLLM_MULTIMODAL_DISAGGREGATED"
"""TensorRT-LLM's variable: if it is 1, the LLM loads no vision tower and depends on encode workers."""


class PromptRequestMedia:
    """One request's images, loaded at the first use and released at the request's end."""

    def __init__(self, loader: PromptMediaLoader, sent: Sequence[Sent]) -> None:
        self._loader, self._sent = loader, sent
        self._ready: ReadyPrompt | None = None

    def __len__(self) -> int:
        return len(self._sent)

    async def ready(self, token_ids: Sequence[int]) -> ReadyPrompt:
        """The prompt with its images. Raises the errors of :meth:`PromptMediaLoader.load`."""
        self._ready = await self._loader.load(token_ids, self._sent)
        return self._ready

    def close(self) -> None:
        if self._ready is not None and not self._ready.is_taken:
            self._loader.forget(self._ready)


class PromptMediaLoader:
    """The image loader of a worker whose engine preprocesses images itself.

    ``workers``: the encode workers of its topology; None if the engine's own vision tower encodes.
    """

    def __init__(
        self,
        engine: Engine,
        decoding: Decoding,
        *,
        tokenizer: Tokenizer | None,
        workers: EncodeWorkers | None,
        limits: MediaLimits,
        metrics: MediaMetrics,
        share_bytes: Callable[[Any], SharedTensor] = share,
    ) -> None:
        assert engine.facts.image_token_id is not None, "only engines that take images have a loader"
        self.placeholders = Placeholders(engine.facts.image_token_id)
        self._engine, self._decoding, self._tokenizer = engine, decoding, tokenizer
        self._workers, self._limits, self._metrics = workers, limits, metrics
        self._share = share_bytes
        self._has_tower = os.environ.get(_NO_TOWER) != "1"
        self._held = HeldMedia(limits.media_memory_bytes)
        self._turn = 0
        self._dropping: set[asyncio.Future[None]] = set()

    def media_of(self, wire: Mapping[str, Any]) -> PromptRequestMedia | None:
        """The images of Dynamo's request, before any is fetched; None if it has neither images nor placeholders.

        Raises InvalidRequest.
        """
        sent = sent_media(wire, self.placeholders)
        check_counts(sent, self._limits)
        if any(one.kind == "embedding" for one in sent):
            raise InvalidRequest("the request brings an embedding, expected images: this engine takes no other media")
        check_placeholders(wire.get("token_ids") or (), self.placeholders, sent)
        return PromptRequestMedia(self, sent) if sent else None

    async def load(self, token_ids: Sequence[int], sent: Sequence[Sent]) -> ReadyPrompt:
        """Loads the images into a prompt.

        Raises MediaError, InvalidRequest, NoEncoder, or the error of the engine's processor.
        """
        blobs = await all_or_cancel(self._fetch(one) for one in sent)
        if self._workers is not None:
            text = self._text_of(token_ids)
            handles = await self._ask(self._workers, text, blobs)
            if handles is not None:
                return await self._prepare(PicturePrompt(list(token_ids), text, (), handles))
        if not self._has_tower:
            raise NoEncoder("no encode worker answered; try again once one is back")
        self._metrics.fallbacks += len(blobs) if self._workers is not None else 0
        most = self._engine.facts.context_length
        pictures = await all_or_cancel(self._decoding.for_engine(blob, self._engine, most) for blob in blobs)
        with self._decoding.timed("put", len(blobs)):
            return await self._prepare(PicturePrompt(list(token_ids), pictures=pictures))

    def forget(self, held: ReadyPrompt | Mapping[str, Any]) -> None:
        """Releases, in the background, a prompt or handles that no request will use."""
        drop = self._engine.drop_prompt if isinstance(held, ReadyPrompt) else self._engine.drop_handles
        dropping = asyncio.ensure_future(asyncio.to_thread(drop, held))  # type: ignore[arg-type]
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _prepare(self, prompt: PicturePrompt) -> ReadyPrompt:
        """Builds the prompt in a thread.

        Drops ``prompt.handles`` if that fails, and its result if the request was cancelled.
        """
        working = asyncio.ensure_future(asyncio.to_thread(self._engine.prepare_prompt, prompt))
        try:
            return await asyncio.shield(working)
        except ValueError as error:
            self._forget_result(prompt.handles, working)
            raise InvalidRequest(str(error)) from error
        except asyncio.CancelledError:
            # the thread can't be cancelled and continues
            working.add_done_callback(partial(self._forget_result, prompt.handles))
            raise
        except BaseException:
            self._forget_result(prompt.handles, working)
            raise

    def _forget_result(self, handles: Mapping[str, Any], done: asyncio.Future[ReadyPrompt]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.forget(done.result())
        elif handles:
            self.forget(handles)

    async def _fetch(self, sent: Sent) -> Blob:
        with self._metrics.timed("fetch"):
            return await fetch(sent.url, self._limits, kind=sent.kind, held=self._held)

    async def _ask(self, workers: EncodeWorkers, text: str, blobs: Sequence[Blob]) -> Mapping[str, Any] | None:
        """The handles that one of ``workers`` made; None if none answered.

        Raises MediaError under the client's own label.
        """
        async with AsyncExitStack() as held:
            files = [await held.enter_async_context(file_of(blob, self._share)) for blob in blobs]
            question = handle_encoder.question(text, files, self._engine.facts.context_length)
            ids = sorted(workers.ids())
            self._turn += 1
            for index in range(len(ids)):
                # round robin: encode workers of these engines cache nothing
                worker = ids[(self._turn + index) % len(ids)]
                self._metrics.retries += index > 0
                try:
                    with self._decoding.timed("remote", len(blobs)):
                        async with asyncio.timeout(encode_seconds(self._limits, len(blobs))):
                            return handle_encoder.read_answer(await workers.ask(worker, question))
                except handle_encoder.RefusedPicture as refused:
                    raise refused.error.about(blobs[refused.index].label) from refused
                except Exception as error:
                    logger.warning("encode worker %x did not encode %d images: %r", worker, len(blobs), error)
        return None

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """The text that the engine's tokenizer encodes to ``token_ids``. Raises InvalidRequest if there is none."""
        if self._tokenizer is None:
            raise InvalidRequest("with encode workers, images need a fast tokenizer, which this model lacks")
        given = list(token_ids)
        for ids in (given, given[1:]):  # the tokenizer may add BOS itself
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if list(self._tokenizer.encode(text).ids) == given:
                return text
        raise InvalidRequest(
            "the prompt's tokens are not those of its text, but with encode workers TensorRT-LLM tokenizes the text "
            "again; send text, or serve without --encode"
        )

"""The encode role for engines whose encoder returns handles (TensorRT-LLM): encodes the images of one prompt.

The embeddings stay on this worker's GPU. A handle is TensorRT-LLM's serialised CUDA IPC handle, for one consumer that
sees the same GPU. The requests come from other trtx workers, because Dynamo 1.6.1's frontend does not call them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from dynamo.common.backend.multimodal import encoder_terminal_chunk

from trtx.engine import Engine
from trtx.engine.api import PicturePrompt, SharedTensor, read_shared
from trtx.media import THIS_PICTURE, Blob, MediaError
from trtx.worker.multimodal.decoding import Decoding
from trtx.worker.multimodal.encode_contract import Contract, OtherRelease
from trtx.worker.multimodal.encode_endpoint import ASKED
from trtx.worker.multimodal.encode_rpc import refusal
from trtx.worker.requests.chunks import Chunk
from trtx.worker.requests.faults import EngineError
from trtx.worker.requests.invalid_request import InvalidRequest

CONTRACT = Contract("trtx-prompts", 2)
"""Version 1 had no contract name."""


class RefusedPicture(Exception):
    """Image ``index`` of a request is faulty: every encode worker would refuse it.

    The message names the image THIS_PICTURE, a neutral label that the requester replaces with its own.
    """

    def __init__(self, index: int, error: MediaError) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class HandleEncoder:
    """Serves encode requests, each with one prompt and its images, with an engine's vision encoder."""

    def __init__(self, engine: Engine, decoding: Decoding) -> None:
        self._engine, self._decoding = engine, decoding

    async def encode(self, wire: Mapping[str, Any], *, is_wanted: Callable[[], bool] = lambda: True) -> Chunk:
        """The terminal chunk, with the answer in ``encoder_result``.

        Raises InvalidRequest for anything but an encode request from a worker. ``is_wanted`` returns False once the
        requester has disconnected and will not release the handles.
        """
        asked = (wire.get("extra_args") or {}).get(ASKED)
        try:
            text, files, most_rows = _read_question(asked)
        except (ValueError, OtherRelease) as error:
            raise InvalidRequest(f"encode workers only serve other trtx workers: {error}") from error
        pictures = []
        try:
            for index, file in enumerate(files):
                try:
                    data = await asyncio.to_thread(read_shared, file)
                    pictures.append(await self._decoding.for_engine(Blob(data, THIS_PICTURE), self._engine, most_rows))
                except MediaError as error:
                    raise RefusedPicture(index, error) from error
        except RefusedPicture as refused:
            return _chunk({**refusal(refused.error), "picture": refused.index})
        try:
            with self._decoding.timed("encode", len(pictures)):
                handles = await self._made(PicturePrompt([], text, pictures))
        except ValueError as error:  # the LLM API raises ValueError for arguments that it refuses
            return _chunk({**refusal(MediaError(422, f"{THIS_PICTURE} can't be encoded: {error}")), "picture": 0})
        except Exception as error:
            raise EngineError(error) from error
        if not is_wanted():
            await asyncio.to_thread(self._engine.drop_handles, handles)
        return _chunk(handles)

    async def _made(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        """Encodes the prompt's images in a thread.

        Drops the handles if the requester has gone by the time they exist.
        """
        working = asyncio.ensure_future(asyncio.to_thread(self._engine.encode, prompt))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(self._drop_result)  # the thread can't be cancelled and continues
            raise

    def _drop_result(self, done: asyncio.Future[Mapping[str, Any]]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.get_loop().run_in_executor(None, self._engine.drop_handles, done.result())


def _chunk(answered: Mapping[str, Any]) -> Chunk:
    chunk: Chunk = dict(encoder_terminal_chunk(CONTRACT.marked(answered)))
    return chunk


# --- the messages of both ends, as JSON ---


def question(text: str, files: Sequence[SharedTensor], most_rows: int) -> dict[str, Any]:
    """A request to encode ``files``, each of which holds the bytes of one image.

    ``text`` is the prompt's text with one placeholder per image. ``most_rows`` is the requester's context length.
    """
    asked = {"text": text, "pictures": msgspec.to_builtins(list(files)), "most_rows": most_rows}
    return CONTRACT.marked(asked)


def _read_question(asked: Any) -> tuple[str, list[SharedTensor], int]:
    """Raises ValueError for a malformed message, OtherRelease for a protocol mismatch."""
    if not isinstance(asked, Mapping) or not asked.get("pictures"):
        raise ValueError("expected text, pictures and most_rows")
    CONTRACT.unmarked(asked)
    return (
        msgspec.convert(asked.get("text"), str),
        msgspec.convert(asked["pictures"], list[SharedTensor]),
        msgspec.convert(asked.get("most_rows"), int),
    )


def read_answer(answered: Mapping[str, Any]) -> Mapping[str, Any]:
    """The handles. Raises RefusedPicture for a faulty image, OtherRelease for a protocol mismatch."""
    found = CONTRACT.unmarked(answered)
    if "error" in found:
        raise RefusedPicture(found["picture"], MediaError(found["status"], found["error"]))
    return found

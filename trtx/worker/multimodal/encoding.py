"""The encode role of engines whose encoder gives handles: pictures of one prompt in, handles to their embeddings out.

The embeddings stay on this worker's GPU; a handle is TensorRT-LLM's own serialised CUDA IPC handle, for one consumer
that sees the same GPU. Other workers of trtx ask: the 1.4.2 frontend asks no encoder.
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
"""1 had no name."""


class RefusedPicture(Exception):
    """Picture ``index`` of a question is at fault: another encode worker would find it too. About THIS_PICTURE."""

    def __init__(self, index: int, error: MediaError) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class ImageEncoder:
    """An engine's vision encoder behind questions of one prompt and its pictures."""

    def __init__(self, engine: Engine, decoding: Decoding) -> None:
        self._engine, self._decoding = engine, decoding

    async def encode(self, wire: Mapping[str, Any], *, is_wanted: Callable[[], bool] = lambda: True) -> Chunk:
        """The terminal chunk, with the answer in ``encoder_result``. Raises InvalidRequest for what is no question of
        a worker. ``is_wanted``: False once whoever asked has gone, and will let go of nothing."""
        asked = (wire.get("extra_args") or {}).get(ASKED)
        try:
            text, files, most_rows = _read_question(asked)
        except (ValueError, OtherRelease) as error:
            raise InvalidRequest(f"an encode worker answers other workers of trtx alone: {error}") from error
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
        except ValueError as error:  # how the LLM API refuses an argument
            return _chunk({**refusal(MediaError(422, f"{THIS_PICTURE} can't be encoded: {error}")), "picture": 0})
        except Exception as error:
            raise EngineError(error) from error
        if not is_wanted():
            await asyncio.to_thread(self._engine.drop_handles, handles)
        return _chunk(handles)

    async def _made(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        """Lets go of the handles where nobody waits any more by the time that they are there."""
        working = asyncio.ensure_future(asyncio.to_thread(self._engine.encode, prompt))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(self._drop_result)  # the thread goes on
            raise

    def _drop_result(self, done: asyncio.Future[Mapping[str, Any]]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.get_loop().run_in_executor(None, self._engine.drop_handles, done.result())


def _chunk(answered: Mapping[str, Any]) -> Chunk:
    chunk: Chunk = dict(encoder_terminal_chunk(CONTRACT.marked(answered)))
    return chunk


# --- what the two ends say to each other, as JSON ---


def question(text: str, files: Sequence[SharedTensor], most_rows: int) -> dict[str, Any]:
    """``text``: of the prompt, with one placeholder for each of ``files``, which hold the bytes of a picture each.
    ``most_rows``: that the context of whoever asks holds."""
    asked = {"text": text, "pictures": msgspec.to_builtins(list(files)), "most_rows": most_rows}
    return CONTRACT.marked(asked)


def _read_question(asked: Any) -> tuple[str, list[SharedTensor], int]:
    """Raises ValueError for what is no question, OtherRelease for one of another contract."""
    if not isinstance(asked, Mapping) or not asked.get("pictures"):
        raise ValueError("expected text, pictures and most_rows")
    CONTRACT.unmarked(asked)
    return (
        msgspec.convert(asked.get("text"), str),
        msgspec.convert(asked["pictures"], list[SharedTensor]),
        msgspec.convert(asked.get("most_rows"), int),
    )


def read_answer(answered: Mapping[str, Any]) -> Mapping[str, Any]:
    """Handles. Raises RefusedPicture, OtherRelease."""
    found = CONTRACT.unmarked(answered)
    if "error" in found:
        raise RefusedPicture(found["picture"], MediaError(found["status"], found["error"]))
    return found

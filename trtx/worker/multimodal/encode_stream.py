"""Streams an encode worker's answer: empty chunks while it encodes, then the result."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import GenerateRequest
from dynamo.common.backend.health_check import is_probe

from trtx.engine import Engine
from trtx.worker.multimodal.embedding_encoder import EmbeddingEncoder
from trtx.worker.multimodal.encode_endpoint import HEARTBEAT_SECONDS
from trtx.worker.multimodal.encode_rpc import is_refusal
from trtx.worker.multimodal.handle_encoder import HandleEncoder
from trtx.worker.requests.chunks import Chunk
from trtx.worker.requests.disconnects import cancel


class EncodeStream:
    """The chunks of one encode request."""

    def __init__(self, encoding: asyncio.Future[Chunk]) -> None:
        self._encoding = encoding
        self._answer: Chunk | None = None

    async def next(self) -> Chunk | None:
        """The next chunk; None after the last one.

        Until the answer is ready, each call returns an empty chunk after HEARTBEAT_SECONDS, so that the requester can
        tell a busy worker from a stopped one.
        """
        if self._answer is not None:
            return None
        if not (await asyncio.wait((self._encoding,), timeout=HEARTBEAT_SECONDS))[0]:
            return {"token_ids": [], "index": 0}
        self._answer = self._encoding.result()
        return self._answer

    def account(self) -> str:
        """The outcome of an answer that was sent whole."""
        answer = self._answer or {}
        return "invalid" if is_refusal(answer.get("encoder_result") or {}) else "stop"

    def close(self) -> None:
        cancel(self._encoding)


def encode_stream(
    encoder: HandleEncoder | EmbeddingEncoder, engine: Engine, request: GenerateRequest, context: Context
) -> EncodeStream:
    """Starts to encode ``request``. A health probe has no image, so its answer is the engine's own health."""
    if is_probe(request):
        ready: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        ready.set_result({"token_ids": [], "index": 0, "finish_reason": "stop" if engine.is_alive() else "cancelled"})
        return EncodeStream(ready)
    work: Any = encoder.encode(request, is_wanted=lambda: not context.is_stopped())
    return EncodeStream(asyncio.ensure_future(work))

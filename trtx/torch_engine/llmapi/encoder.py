"""``MultimodalEncoder``: TensorRT-LLM's, in front of the encoder's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from trtx.torch_engine.encoder_messages import DEFAULT_MAX_NUM_TOKENS, Encoded, EncoderArgs, EncoderStats, Grid
from trtx.torch_engine.llmapi.arguments import resolve_llm_args
from trtx.torch_engine.llmapi.encoder_client import EncoderClient
from trtx.torch_engine.llmapi.llm import model_directory
from trtx.torch_engine.shared_tensor import SharedTensor, remove_shared

_TAKEN = ("dtype", "max_batch_size", "max_num_tokens")  # of LlmArgs: what an encoder makes anything of
_IGNORED = "an encoder keeps no tokens and samples none"


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """One picture as the checkpoint's own image processor gave it. Who made the tensor removes it, after the answer.

    ``pixels``: float32, ``[1, 3, height, width]`` of CLIP's processor, ``[patches, values]`` of Qwen's.
    ``grid``: time, height and width in patches, before any are merged; None for a processor that gives none.
    """

    key: bytes
    pixels: SharedTensor
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Of one picture: a row of ``tensor`` in place of each of its placeholders. Whoever has it removes the tensor.

    ``tensor``: ``[rows, hidden]`` in ``dtype``, the decoder's. ``grid``: of the rows, time, height and width in merged
    patches; None of a model whose pictures all have the same.
    """

    key: bytes
    tensor: SharedTensor
    grid: Grid | None

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def hidden(self) -> int:
        """Columns; of a model with deepstack all its levels beside one another."""
        return self.tensor.shape[1]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


class MultimodalEncoder:
    """Loads the vision tower and projector of a model directory into a process of their own, and encodes pictures.

    The constructor returns when it is ready. Raises ValueError for arguments that TensorRT-LLM would refuse or the
    torch engine cannot honour, ``trtx.errors.UsageError`` for a checkpoint or device that does not fit, and
    RuntimeError when the process dies while loading. Arguments that are accepted without effect are named in
    ``unsupported_fields``.
    """

    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        given = {
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
        } | kwargs
        path = model_directory(model)
        resolved, self.unsupported_fields = resolve_llm_args(str(path), given)
        taken = {name: getattr(resolved, name) for name in _TAKEN}
        if kwargs.get("max_num_tokens") is None:
            taken["max_num_tokens"] = DEFAULT_MAX_NUM_TOKENS
        self.unsupported_fields |= {name: _IGNORED for name in kwargs if name not in _TAKEN}
        self.args = EncoderArgs(model=str(path), **taken)
        self._client = EncoderClient(self.args)
        try:
            self._ready = self._client.ready.result()
        except BaseException:
            self._client.shutdown()
            raise

    # --- pictures that are prepared already ---

    async def encode(self, items: Sequence[PreparedPicture]) -> list[Embedding]:
        """One embedding for each, in their order; they share batches with whatever else waits.

        Raises the error of the first that came to nothing, once all have ended: RequestError for pixels that are none
        of this model's, RequestFailed where the encoder failed on them, RuntimeError when it died. What the others gave
        is removed then, and so it is when the caller is cancelled.
        """
        ends = await self.encode_each(items)
        for end in ends:
            if isinstance(end, RuntimeError):
                discard(one for one in ends if isinstance(one, Embedding))
                raise end
        return [end for end in ends if isinstance(end, Embedding)]

    async def encode_each(self, items: Sequence[PreparedPicture]) -> list[Embedding | RuntimeError]:
        """As :meth:`encode`, with each item's own end: its embedding or its error."""
        asked: list[Future[Encoded]] = []
        try:
            ends: list[Future[Encoded] | RuntimeError] = []
            for item in items:
                try:
                    ends.append(self._client.submit(item.pixels, item.grid))
                except RuntimeError as error:
                    ends.append(error)
            asked = [end for end in ends if isinstance(end, Future)]
            await asyncio.gather(*map(asyncio.wrap_future, asked), return_exceptions=True)
        except BaseException:
            for future in asked:
                if not future.cancel():
                    _remove_result(future)
            raise
        return [_embedding(item, end) for item, end in zip(items, ends, strict=True)]

    # --- what the encoder says about itself ---

    @property
    def hidden(self) -> int:
        """Columns of an embedding."""
        return self._ready.width

    @property
    def dtype(self) -> str:
        """Of an embedding."""
        return self._ready.dtype

    @property
    def encoder_pid(self) -> int:
        return self._client.pid

    def stats(self) -> EncoderStats:
        """Totals since the start, as the encoder last said."""
        return self._client.stats

    @property
    def num_open(self) -> int:
        """Pictures that wait or are being encoded."""
        return self._client.num_open

    def _check_health(self) -> bool:
        """False once the encoder's process died, reported a fatal error, or was shut down."""
        return self._client.is_healthy

    # --- the end ---

    def shutdown(self) -> None:
        """Ends the encoder's process within 10 s at most; what is open ends with RuntimeError. Idempotent."""
        self._client.shutdown()

    def __enter__(self) -> MultimodalEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def discard(embeddings: Any) -> None:
    """Removes the tensors of embeddings that nobody will use."""
    for one in embeddings:
        remove_shared(one.tensor)


def _embedding(item: PreparedPicture, end: Future[Encoded] | RuntimeError) -> Embedding | RuntimeError:
    if isinstance(end, RuntimeError):
        return end
    error = end.exception()
    if error is not None:
        assert isinstance(error, RuntimeError), error
        return error
    encoded = end.result()
    assert encoded.rows is not None
    return Embedding(item.key, encoded.rows, encoded.grid)


def _remove_result(ended: Future[Encoded]) -> None:
    if not ended.cancelled() and ended.exception() is None and (rows := ended.result().rows) is not None:
        remove_shared(rows)

"""``MultimodalEncoder``: TensorRT-LLM's class, in front of the encoder's own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtx.config.torch_fields import ENCODER_FIELDS
from trtx.ipc.encoder_messages import DEFAULT_MAX_NUM_TOKENS, Encoded, EncoderArgs, EncoderStats
from trtx.ipc.shared_tensor import remove_shared
from trtx.torch_engine.llmapi.arguments import resolve_llm_args
from trtx.torch_engine.llmapi.encoded import Embedding, PreparedPicture, discard
from trtx.torch_engine.llmapi.encoder_client import EncoderClient
from trtx.torch_engine.llmapi.llm import model_directory

if TYPE_CHECKING:
    from trtx.torch_engine.llmapi.encoder_requests import EncoderOutput, EncoderRequests


class MultimodalEncoder:
    """Loads the vision tower and projector of a model directory into a separate process, and encodes images.

    The constructor returns once the encoder is ready. It raises ValueError for arguments that TensorRT-LLM would refuse
    or that the torch engine can't honour, ``trtx.errors.UsageError`` for an unsuitable checkpoint or device, and
    RuntimeError if the process dies while loading. ``unsupported_fields`` names the accepted arguments that have no
    effect.
    """

    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        arena_bytes: int = 0,
        **kwargs: Any,
    ) -> None:
        """``arena_bytes``: GPU memory for embeddings that :meth:`encode` leaves on the GPU. With 0, or without a GPU,
        it leaves none there.
        """
        given = {
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
        } | kwargs
        path = model_directory(model)
        resolved, unused = resolve_llm_args(str(path), given, "encode")
        self.unsupported_fields = {name: why for name, why in unused.items() if name.partition(".")[0] in kwargs}
        taken = {name: getattr(resolved, name) for name in ENCODER_FIELDS}
        if kwargs.get("max_num_tokens") is None:
            taken["max_num_tokens"] = DEFAULT_MAX_NUM_TOKENS
        self.args = EncoderArgs(model=str(path), arena_bytes=arena_bytes, **taken)
        self._requests: EncoderRequests | None = None  # created on first use: it starts processes
        self._requests_lock = threading.Lock()
        self._client = EncoderClient(self.args)
        try:
            self._ready = self._client.ready.result()
        except BaseException:
            self._client.shutdown()
            raise

    # --- TensorRT-LLM's requests ---

    def generate(self, inputs: Any, use_tqdm: bool = True) -> EncoderOutput | list[EncoderOutput]:
        """Blocks; returns one result, or a list of results in the order of ``inputs``. ``use_tqdm`` has no effect."""
        prompts = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        outputs = [self.generate_async(prompt) for prompt in prompts]
        results = [output.result() for output in outputs]
        return results if isinstance(inputs, (list, tuple)) else results[0]

    def generate_async(self, inputs: Any) -> EncoderOutput:
        """Starts to encode the images of one prompt.

        ``inputs``: a dict with ``multi_modal_data {"image": [Pillow images, or uint8 arrays [height, width, 3]]}``. The
        result has a handle for each image (``trtx.torch_engine.embeddings``), for one reader, which must read it before
        the lease ends. The first call starts the processes that prepare images. Raises RequestError for refused inputs,
        UsageError for a checkpoint without a usable image processor.
        """
        with self._requests_lock:
            if self._requests is None:
                from trtx.torch_engine.llmapi.encoder_requests import EncoderRequests

                self._requests = EncoderRequests(Path(self.args.model), self.encode)
        return self._requests.submit(inputs)

    # --- prepared images ---

    async def encode(self, items: Sequence[PreparedPicture], *, on_device: bool = False) -> list[Embedding]:
        """Returns one embedding for each item, in their order. Items share batches with other waiting items.

        ``on_device``: the data may stay on the encoder's GPU; use it for an engine on the same host. Once all items
        have ended, raises the error of the first that failed: RequestError for pixels that do not fit this model,
        RequestFailed if the encoder failed on them, RuntimeError if it died. The other embeddings are removed in this
        case, and if the caller is cancelled.
        """
        ends = await self.encode_each(items, on_device=on_device)
        for end in ends:
            if isinstance(end, RuntimeError):
                discard(one for one in ends if isinstance(one, Embedding))
                raise end
        return [end for end in ends if isinstance(end, Embedding)]

    async def encode_each(
        self, items: Sequence[PreparedPicture], *, on_device: bool = False
    ) -> list[Embedding | RuntimeError]:
        """Like :meth:`encode`, but returns each item's own outcome: its embedding or its error."""
        asked: list[Future[Encoded]] = []
        try:
            ends: list[Future[Encoded] | RuntimeError] = []
            for item in items:
                try:
                    ends.append(self._client.submit(item.pixels, item.grid, on_device=on_device))
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

    # --- state of the encoder ---

    @property
    def hidden(self) -> int:
        """Number of columns of an embedding."""
        return self._ready.width

    @property
    def dtype(self) -> str:
        """Dtype of an embedding."""
        return self._ready.dtype

    @property
    def encoder_pid(self) -> int:
        return self._client.pid

    def stats(self) -> EncoderStats:
        """Totals since the start, as last reported by the encoder."""
        return self._client.stats

    @property
    def num_open(self) -> int:
        """Number of images that are waiting or being encoded."""
        return self._client.num_open

    def _check_health(self) -> bool:
        """False once the encoder's process has died, reported a fatal error, or been shut down."""
        return self._client.is_healthy

    # --- shutdown ---

    def shutdown(self) -> None:
        """Ends the encoder's process within 10 s; open items end with RuntimeError. Idempotent."""
        self._client.shutdown()
        with self._requests_lock:
            if self._requests is not None:
                self._requests.close()
                self._requests = None

    def __enter__(self) -> MultimodalEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


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

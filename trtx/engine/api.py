"""The engine interface of a worker. Base-class methods define the behaviour when a feature is missing.

``torch`` and ``paced`` implement it in :mod:`trtx.engine.embedded` and :mod:`trtx.engine.paced`, TensorRT-LLM in
:mod:`trtx.engine.tensorrt_llm.adapter`. A worker uses :class:`EngineApi` and :class:`Engine` only, never an LLM object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trtx.engine.kinds import EngineKind
from trtx.ipc.encoder_messages import Clip
from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, lend, read_shared, remove_left, remove_shared, share
from trtx.torch_engine.embeddings import (
    EmbeddingExports,
    EmbeddingGone,
    EmbeddingHandle,
    EmbeddingMismatch,
    EmbeddingReader,
    EmbeddingUnreachable,
    parse_handle,
)
from trtx.torch_engine.media_positions import stretch
from trtx.torch_engine.messages import EngineTimes, MediaSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Clip",
    "EmbeddingExports",
    "EmbeddingGone",
    "EmbeddingHandle",
    "EmbeddingMismatch",
    "EmbeddingReader",
    "EmbeddingUnreachable",
    "Engine",
    "EngineApi",
    "EngineFacts",
    "EngineTimes",
    "Fault",
    "HandoffTotals",
    "Hints",
    "MediaSpan",
    "PicturePrompt",
    "ReadyPrompt",
    "Result",
    "Row",
    "SharedTensor",
    "SharedTensorError",
    "Start",
    "TowerOutput",
    "lend",
    "parse_handle",
    "read_shared",
    "remove_left",
    "remove_shared",
    "share",
    "stated",
    "stretch",
]

Row = Mapping[str, Any]
"""A row of iteration stats, or a KV cache event, with TensorRT-LLM's keys. An engine may return it as JSON text."""

Fault = Literal["refused", "failed", "unexpected", "fatal"]
"""Whose fault an exception is.

- ``refused``: the request's; the text is for the client.
- ``failed``: the engine's, for one valid request; the text says how it failed.
- ``unexpected``: an exception of a class that is not the engine's; the engine keeps serving.
- ``fatal``: the engine's state is unknown after it.
"""


@dataclass(frozen=True, slots=True)
class Hints:
    """When and where a request should run. No answer depends on hints, so an engine ignores those that it can't use."""

    priority: float | None = None  # 0 to 1, higher is more urgent; None: the engine's default
    dp_rank: int | None = None  # attention-DP rank that the router chose
    conversation_id: str | None = None
    # Retention priority of its KV blocks, from 0 to 100; None: the engine's default of 35, as TensorRT-LLM's.
    retention_priority: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine resolved at its start. None: the engine does not report it, or has no such thing."""

    context_length: int  # prompt and output tokens together
    block_size: int | None = None  # tokens per KV block; None: the engine has no KV cache (role encode)
    num_blocks: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    dp_size: int = 1  # number of attention-DP ranks, each with its own KV cache; 1 without attention DP
    guides: bool = False  # requests may have grammars that their answers follow (guided decoding)
    has_kv_events: bool = False  # the engine reports stored and removed blocks if its config enables it
    embedding_dtype: str | None = None  # dtype of an encoder's embedding rows
    image_token_id: int | None = None
    """Placeholder token of an image, for engines that preprocess a prompt's images themselves
    (:meth:`Engine.prepare_prompt`), and for their encoders; None for all other engines.
    """
    takes_handles: bool = False  # such an engine accepts its encoder's handles instead of images
    sleeps: bool = False  # the engine can release its memory, and allocate it again
    shared_weights: tuple[str, int] | None = None  # "loaded" or "mapped", and the bytes that other engines use too
    left_out: tuple[str, ...] = ()  # arguments that the engine accepted and ignores; they only affect speed or memory


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """The embedding of an image or a video.

    ``rows``: ``[tokens, hidden]`` in the decoder's dtype; the receiver owns the file and removes it. ``grid``: (t, h,
    w) in merged patches, one per row; None for models whose images have a fixed size. ``clip``: set for videos; an
    encoder alone does not know it.
    """

    rows: SharedTensor
    grid: tuple[int, int, int] | None = None
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt with images, for an engine that preprocesses them itself.

    ``token_ids`` contains one placeholder per image. ``text`` is the text that encodes to ``token_ids``, with special
    tokens written out, or empty if it is not needed. ``pictures`` are uint8 ``[height, width, 3]``, in the order of
    their placeholders. ``handles`` replace the pictures: the result of :meth:`Engine.encode`.
    """

    token_ids: list[int]
    text: str = ""
    pictures: Sequence[npt.NDArray[np.uint8]] = ()
    handles: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ReadyPrompt:
    """The result of :meth:`Engine.prepare_prompt`, for one call of :meth:`Engine.generate_ready`.

    ``token_ids`` is the prompt as the engine computes it, with one placeholder per row. ``inputs`` is the engine's own
    data. ``params`` are fields of DisaggregatedParams that belong to the prompt. ``is_taken``: a request owns the
    prompt and all that it holds.
    """

    token_ids: list[int]
    inputs: Any
    params: Mapping[str, Any]
    is_taken: bool = False


class HandoffTotals(Protocol):
    """Totals of KV handoffs since the start, and the number of current leases."""

    reads: int
    bytes: int
    seconds: float  # summed over reads
    failed_reads: int
    recomputed: int
    leases: int
    expired_leases: int
    corrupted: int  # handoffs corrupted on purpose by TRTX_FAULT; 0 without it


@dataclass(frozen=True, slots=True)
class Transfer:
    """The KV that arrived from a prefill engine for one request; ``seconds`` 0: none arrived."""

    bytes: int
    seconds: float
    recomputed_because: str = ""  # why the prompt was computed instead; empty: it was not, or no transfer was requested


class Result(Protocol):
    """The LLM API's ``RequestOutput``: cumulative, and the same object at every step."""

    finished: bool

    @property
    def outputs(self) -> Sequence[Any]: ...

    def abort(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class Engine(Protocol):
    """A loaded engine. A method with a body defines the behaviour of engines that lack the feature."""

    facts: EngineFacts
    engine_pid: int | None = None
    """The process that holds the device.

    None: the worker's own process, or several processes, which the worker records as ranks.
    """

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: Any,
        *,
        streaming: bool,
        disaggregated_params: Any,
        cache_salt: str | None,
        trace_headers: Mapping[str, str] | None,
        hints: Hints,
        media: Sequence[MediaSpan] = (),
        routing_token_ids: Sequence[int] | None = None,
    ) -> Result:
        """Submits a request, as the LLM API's method of this name does.

        Raises ValueError, or an exception that :attr:`EngineApi.fault` classifies, to refuse a request.

        ``media``: the placeholder ranges in ``inputs``, for engines with :attr:`EngineApi.missing_media`. Their
        embeddings must have been put before, unless the engine does not need them because its cache or a prefill worker
        has the KV. ``routing_token_ids``: token ids that KV events report instead of ``inputs``, of the same length;
        None: events omit blocks with images and all blocks after them.
        """
        ...

    def pause(self, result: Result, seconds: float) -> Awaitable[None] | None:
        """Collects the tokens of ``result`` into one step: done after ``seconds``, or once the result has ended.

        Called between two steps by their consumer. None means that steps are never merged: they are delivered one by
        one, as by TensorRT-LLM's ``GenerationResult``, and a slow consumer falls behind.
        """
        return None

    def rows_of(self, picture: npt.NDArray[np.uint8]) -> int | None:
        """Number of prompt positions that an image would take, before it is preprocessed; None: unknown. Blocks.

        ``picture`` is uint8 ``[height, width, 3]``. Raises ValueError for an image that the model's processor refuses.
        Called for engines and encoders whose facts have an ``image_token_id``.
        """
        return None

    def prepare_prompt(self, prompt: PicturePrompt) -> ReadyPrompt:
        """Runs the model's processor on a prompt; blocks. Called for engines whose facts have an ``image_token_id``.

        Raises ValueError for a prompt that the processor refuses. The result owns resources, including the handles;
        they are freed by the request that takes it, or by :meth:`drop_prompt`.
        """
        raise LookupError("this engine does not support images in prompts")

    def drop_handles(self, handles: Mapping[str, Any]) -> None:
        """Frees an encoder's handles that no prompt was made from. Blocks."""
        raise LookupError("this engine takes no handles")

    def drop_prompt(self, prompt: ReadyPrompt) -> None:
        """Frees a prepared prompt that no request takes. Blocks."""
        raise LookupError("this engine does not support images in prompts")

    def generate_ready(self, prompt: ReadyPrompt, sampling_params: Any, **asked: Any) -> Result:
        """Like :meth:`generate_async`, with a prepared prompt; ``asked`` are the remaining arguments."""
        raise LookupError("this engine does not support images in prompts")

    def put_embedding(self, key: bytes, rows: SharedTensor) -> Awaitable[None]:
        """Stores an embedding for later prompts, until it is dropped.

        Done once the file was read; the file may then be removed. Raises ValueError for rows that the model can't use,
        and EmbeddingGone or EmbeddingUnreachable for rows on an encoder's device that can't be read; the caller can
        have them encoded again.
        """
        raise LookupError("this engine does not support embeddings")

    def drop_embeddings(self, keys: Sequence[bytes]) -> None:
        """Removes embeddings. Requests submitted before keep what they need."""
        raise LookupError("this engine does not support embeddings")

    def encode(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        """Handles to the embeddings of a prompt's images, as JSON-compatible values; blocks.

        They are for one :meth:`prepare_prompt` or :meth:`drop_handles`. Called for encoders whose facts have an
        ``image_token_id``. Raises ValueError for a prompt that is refused or yields no embeddings.
        """
        raise LookupError("this engine makes no handles")

    async def encode_pixels(
        self, pixels: SharedTensor, grid: tuple[int, int, int] | None, *, on_device: bool = False
    ) -> TowerOutput:
        """The embedding of one preprocessed image; concurrent calls share batches.

        Called for encoders of engines with :attr:`EngineApi.missing_media`. The file of ``pixels`` must exist until
        this returns. ``on_device``: the rows may stay on the encoder's device, for an engine on the same host. Raises
        ValueError for pixels that do not fit the model.
        """
        raise LookupError("this engine does not encode images")

    def get_stats_async(self, timeout: float) -> AsyncIterator[Row | str]:
        """Yields rows of iteration stats until none has arrived for ``timeout`` seconds."""
        ...

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Row | str]:
        """Yields KV cache events in the same way; none if ``facts.has_kv_events`` is False."""
        none: tuple[Row, ...] = ()
        for row in none:
            yield row

    def handoff_stats(self) -> HandoffTotals | None:
        """Handoff totals; None if the engine does not count handoffs, in which case no handoff metrics are exported."""
        return None

    def transfer(self, output: Any) -> Transfer | None:
        """The KV transfer of a request that began with a handoff and ended without an error.

        ``output`` is its ``CompletionOutput``. None: the engine does not report transfers.
        """
        return None

    def times(self, output: Any) -> EngineTimes | None:
        """Where the request of this ``CompletionOutput`` spent its time in the engine; None if it is not reported."""
        return None

    def unread_handoffs(self, rows: Iterable[Row]) -> int:
        """Number of handoffs that a decode worker may still read from this engine.

        A stopping prefill worker waits for them. ``rows``: the latest iteration stats of each rank.
        """
        return 0

    def device_memory_bytes(self, rows: Iterable[Row]) -> int | None:
        """Device memory of all processes of the engine; ``rows`` as above.

        None: it uses none, or has not reported it.
        """
        return None

    def is_alive(self) -> bool:
        """False after a fatal error. An engine that can't tell returns True and logs that at its start. May block."""
        ...

    def cause_of_death(self) -> str:
        """Returns why a dead engine died; "" if it does not report it."""
        return ""

    async def release(self, tags: Sequence[str] | None, timeout_s: float) -> None:
        """Releases memory once no request is open. Raises RuntimeError or ValueError, with the reason, if it can't."""
        raise RuntimeError("this engine can't sleep")

    async def resume(self, tags: Sequence[str] | None) -> None:
        """Allocates released memory again. Raises like :meth:`release`."""
        raise RuntimeError("this engine can't sleep")

    async def update_weights(self, model: str, timeout_s: float) -> None:
        """Replaces the weights by those of another checkpoint, in place. Raises like :meth:`release`."""
        raise RuntimeError("this engine can't replace its weights")

    def parked_tags(self) -> Sequence[str]:
        """The memory that is released now."""
        return ()

    def shutdown(self) -> None:
        """Shuts the engine down. May never return."""
        ...


Start = Callable[[Path, Mapping[str, Any]], Engine]
"""Loads an engine from a model directory and an engine config. Blocks until it is ready."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """An engine kind before it is loaded: how to start it, the LLM API's types, and its rules."""

    kind: EngineKind
    engine_type: str  # the label of metrics that have TensorRT-LLM's names; TensorRT-LLM writes "trtllm"
    start: Start
    SamplingParams: Any
    DisaggregatedParams: Any
    Logprob: Any
    fault: Callable[[Exception], Fault]
    new_request_ids: Callable[[int], Callable[[], int | None]]
    """From a worker id, makes a function that makes ``disagg_request_id``s: None if this engine has no such ids."""
    GuidedDecodingParams: Any = None  # None: no answer of this engine can follow a grammar
    guides_after_thinking: bool = False  # True: GuidedDecodingParams has thinking_start_id and thinking_end_id
    versions: Mapping[str, str] = field(default_factory=dict)  # by package, of the libraries that it computes with
    start_encoder: Start | None = None  # None: the engine has no vision encoder
    missing_media: Callable[[Exception], tuple[bytes, ...]] | None = None
    """Keys of the embeddings that the engine lacked to compute a prompt, from the exception that ended the request;
    empty for any other exception. None: the engine takes no embeddings.
    """
    gpus_of: Callable[[Mapping[str, Any]], int] = lambda config: 1
    """Number of GPUs that one worker uses on all of its nodes, from its engine config."""
    # True: the start accepts ``deterministic``, which makes a request's bits independent of its batch
    can_be_deterministic: bool = False
    # False: an abort during a KV transfer would leak blocks, so it waits for the first token
    aborts_transfers: bool = True
    dies_of_stalls: bool = False  # True: treat a stall with open requests as a crash, even if is_alive() is True
    shutdown_seconds: float = 20.0  # longest wait for Engine.shutdown


def stated(values: Any) -> dict[str, Any]:
    """The fields of an LLM API dataclass that are not None. Which fields exist depends on the version."""
    return {one.name: value for one in fields(values) if (value := getattr(values, one.name)) is not None}

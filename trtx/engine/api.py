"""The boundary between a worker and its engine: what every engine offers, and what it means where one has it not.

``torch`` and ``paced`` answer in :mod:`trtx.engine.embedded` and :mod:`trtx.engine.paced`, TensorRT-LLM in
:mod:`trtx.engine.tensorrt_llm.adapter`. A worker asks :class:`EngineApi` and :class:`Engine`, and no LLM itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from trtx.torch_engine.embeddings import (
    EmbeddingExports,
    EmbeddingHandle,
    EmbeddingMismatch,
    EmbeddingReader,
    parse_handle,
)
from trtx.torch_engine.encoder_messages import Clip
from trtx.torch_engine.media_positions import stretch
from trtx.torch_engine.messages import MediaSpan
from trtx.torch_engine.shared_tensor import SharedTensor, SharedTensorError, read_shared, remove_shared, share

__all__ = [
    "ENGINE_KINDS",
    "Clip",
    "EmbeddingExports",
    "EmbeddingHandle",
    "EmbeddingMismatch",
    "EmbeddingReader",
    "Engine",
    "EngineApi",
    "EngineFacts",
    "EngineKind",
    "Fault",
    "HandoffTotals",
    "Hints",
    "MediaSpan",
    "Result",
    "Row",
    "SharedTensor",
    "SharedTensorError",
    "Start",
    "TowerOutput",
    "parse_handle",
    "read_shared",
    "remove_shared",
    "share",
    "stated",
    "stretch",
]

EngineKind = Literal["torch", "tensorrt-llm", "paced"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)

Row = Mapping[str, Any]
"""Of iteration stats, or a KV cache event: TensorRT-LLM's keys. An engine may give it as JSON text."""

Fault = Literal["refused", "failed", "unexpected", "fatal"]
"""Whose an exception is. ``refused``: the request's own, its text is for the client. ``failed``: the engine's, in one
request that was in order, and its text says how. ``unexpected``: none of the engine's own classes; it serves on.
``fatal``: after it the engine's state is unknown."""


@dataclass(frozen=True, slots=True)
class Hints:
    """When and where a request should run. An engine leaves out what it has no use for: no answer depends on it."""

    priority: float | None = None  # 0 to 1, higher first; None: the engine's own default
    dp_rank: int | None = None  # attention-DP rank that the router chose
    conversation_id: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine resolved at its start. None: it does not say, or has none."""

    context_length: int  # prompt and output tokens together
    block_size: int | None = None  # tokens of a KV block; None: it keeps no tokens (role encode)
    num_blocks: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    dp_size: int = 1  # attention-DP ranks, each with KV of its own; 1 without attention DP
    has_kv_events: bool = False  # it says what it stored and removed, where its config asks for that
    embedding_dtype: str | None = None  # of the rows that an encoder makes
    left_out: tuple[str, ...] = ()  # arguments that it took and makes nothing of: they change speed or memory alone


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """The embedding of a picture or video. ``rows``: ``[tokens, hidden]`` in the decoder's dtype; whoever got it
    removes the file. ``grid``: (t, h, w) in merged patches, one a row; None where the model's pictures have one size.
    ``clip``: of a video, which an encoder alone does not know."""

    rows: SharedTensor
    grid: tuple[int, int, int] | None = None
    clip: Clip | None = None


class HandoffTotals(Protocol):
    """KV handoffs since the start, and the leases that are out now."""

    reads: int
    bytes: int
    seconds: float  # summed over reads
    failed_reads: int
    recomputed: int
    leases: int
    expired_leases: int
    corrupted: int  # on purpose, by a planted fault; 0 where none is


@dataclass(frozen=True, slots=True)
class Transfer:
    """The KV that came from a prefill engine for one request; 0 s: none did."""

    bytes: int
    seconds: float
    recomputed_because: str = ""  # why the prompt was computed in place of it; empty: it was not, as none was asked for


class Result(Protocol):
    """The LLM API's ``RequestOutput``: cumulative, and the same object at each step."""

    finished: bool

    @property
    def outputs(self) -> Sequence[Any]: ...

    def abort(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class Engine(Protocol):
    """A loaded engine. What has a body here is what absence means: an engine that lacks it inherits that."""

    facts: EngineFacts
    engine_pid: int | None = None
    """The process that holds the device; None: the worker's own, or several, which the worker records as ranks."""

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
        """The LLM API's. Raises ValueError, or what :attr:`EngineApi.fault` knows, for a request that it refuses.

        ``media``: which positions of ``inputs`` hold pictures, of an engine with :attr:`EngineApi.missing_media`;
        their embeddings are put before, or the engine can do without them: its cache, or a prefill worker's KV.
        ``routing_token_ids``: what KV events say in place of ``inputs``, as many; None: they tell of no block that
        holds a picture, or comes after one.
        """
        ...

    def put_embedding(self, key: bytes, rows: SharedTensor) -> Awaitable[None]:
        """For prompts submitted from now on, until it is dropped. Done once the file was read, which may go then.
        Raises ValueError for rows that the model can't use."""
        raise LookupError("this engine takes no embeddings")

    def drop_embeddings(self, keys: Sequence[bytes]) -> None:
        """What was submitted before keeps what it needs."""
        raise LookupError("this engine takes no embeddings")

    def encode(self, inputs: Mapping[str, Any]) -> Any:
        """``DisaggregatedParams`` with handles to the embeddings of a prompt's images; blocks. Asked of what
        ``start_encoder`` started alone. None: it makes nothing of images. Raises ValueError for inputs that it refuses.
        """
        return None

    async def encode_pixels(self, pixels: SharedTensor, grid: tuple[int, int, int] | None) -> TowerOutput:
        """One prepared picture's embedding; concurrent calls share batches. Asked of what ``start_encoder`` started,
        where :attr:`EngineApi.missing_media` is given. The file of ``pixels`` has to stay until then. Raises ValueError
        for pixels that are none of this model's."""
        raise LookupError("this engine makes no embeddings of pixels")

    def get_stats_async(self, timeout: float) -> AsyncIterator[Row | str]:
        """Rows of iteration stats as they come, until none has come for ``timeout`` seconds."""
        ...

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Row | str]:
        """KV cache events in the same way; none where ``facts.has_kv_events`` is False."""
        none: tuple[Row, ...] = ()
        for row in none:
            yield row

    def handoff_stats(self) -> HandoffTotals | None:
        """None: it counts none, and nothing is told of handoffs."""
        return None

    def transfer(self, output: Any) -> Transfer | None:
        """What came for a request that began with a handoff and has ended well, of its ``CompletionOutput``. None: it
        does not say."""
        return None

    def unread_handoffs(self, rows: Iterable[Row]) -> int:
        """How many handoffs a decode worker may still read from here: a prefill worker stays for them. ``rows``: the
        latest iteration stats of each rank. 0: there is nothing to read."""
        return 0

    def device_memory_bytes(self, rows: Iterable[Row]) -> int | None:
        """Of all its processes; ``rows`` as above. None: it holds none, or has not said."""
        return None

    def is_alive(self) -> bool:
        """False after a fatal error. An engine that can't tell says True, and logged that at its start. May block."""
        ...

    def cause_of_death(self) -> str:
        """What a dead engine died of; "": it does not say."""
        return ""

    def shutdown(self) -> None:
        """Ends the engine. May never return."""
        ...


Start = Callable[[Path, Mapping[str, Any]], Engine]
"""Model directory and engine config to a loaded engine. Blocks until it is ready."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """One engine before it is loaded: how to start it, the LLM API's types, and the rules that hold for it."""

    kind: EngineKind
    start: Start
    SamplingParams: Any
    DisaggregatedParams: Any
    Logprob: Any
    fault: Callable[[Exception], Fault]
    new_request_ids: Callable[[int], Callable[[], int | None]]
    """Worker id to a maker of ``disagg_request_id``s; None from it: this engine's requests go without one."""
    versions: Mapping[str, str] = field(default_factory=dict)  # by package, of what it computes with; none: no package
    start_encoder: Start | None = None  # None: this engine has no vision encoder
    missing_media: Callable[[Exception], tuple[bytes, ...]] | None = None
    """Which embeddings an engine lacks to compute a prompt, of the exception that its request ended with; none: it
    ended for another reason. None: this engine takes no embeddings, so its workers take no images."""
    can_be_deterministic: bool = False  # True: ``deterministic`` beside the config keeps a request's bits in any batch
    aborts_transfers: bool = True  # False: an abort during a KV transfer leaks blocks, so it waits for the first token
    dies_of_stalls: bool = False  # True: no step for a while with requests open is a death, whatever is_alive says
    shutdown_seconds: float = 20.0  # longest wait for Engine.shutdown


def stated(values: Any) -> dict[str, Any]:
    """The fields of one of the LLM API's dataclasses that hold something: which there are differs by version."""
    return {one.name: value for one in fields(values) if (value := getattr(values, one.name)) is not None}

"""The boundary between a worker and its engine: what every engine offers, and what it means where one has it not.

``torch`` and ``paced`` answer in :mod:`trtx.engine.embedded` and :mod:`trtx.engine.paced`, TensorRT-LLM in
:mod:`trtx.engine.tensorrt_llm.adapter`. A worker asks :class:`EngineApi` and :class:`Engine`, and no LLM itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

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
from trtx.torch_engine.messages import MediaSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "ENGINE_KINDS",
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
    "EngineKind",
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
    image_token_id: int | None = None
    """The placeholder of a picture, of an engine that is given a prompt's pictures and prepares them itself
    (:meth:`Engine.prepare_prompt`), and of its encoder; None: it is not."""
    takes_handles: bool = False  # such an engine takes what its encoder made in place of the pictures
    left_out: tuple[str, ...] = ()  # arguments that it took and makes nothing of: they change speed or memory alone


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """The embedding of a picture or video. ``rows``: ``[tokens, hidden]`` in the decoder's dtype; whoever got it
    removes the file. ``grid``: (t, h, w) in merged patches, one a row; None where the model's pictures have one size.
    ``clip``: of a video, which an encoder alone does not know."""

    rows: SharedTensor
    grid: tuple[int, int, int] | None = None
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt with pictures for an engine that prepares them itself.

    ``token_ids``: with one placeholder for each picture. ``text``: what they are the tokens of, special ones written
    out; empty where nobody needs it. ``pictures``: uint8 ``[height, width, 3]``, in the order of their placeholders.
    ``handles``: what :meth:`Engine.encode` gave for them in place of them.
    """

    token_ids: list[int]
    text: str = ""
    pictures: Sequence[npt.NDArray[np.uint8]] = ()
    handles: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ReadyPrompt:
    """What :meth:`Engine.prepare_prompt` made, for one call of :meth:`Engine.generate_ready`.

    ``token_ids``: as the engine computes them, with a placeholder for each row. ``inputs``: the engine's own.
    ``params``: fields of DisaggregatedParams that go with them. ``is_taken``: a request has it, and what it holds.
    """

    token_ids: list[int]
    inputs: Any
    params: Mapping[str, Any]
    is_taken: bool = False


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

    def pause(self, result: Result, seconds: float) -> Awaitable[None] | None:
        """Lets what comes for ``result`` add up to one step: done after ``seconds``, or before, once it has ended.
        Asked between two steps, by whoever takes them. None: its steps never add up. Each is given by itself, as by
        TensorRT-LLM's ``GenerationResult``, and who takes them late only lags behind."""
        return None

    def rows_of(self, picture: npt.NDArray[np.uint8]) -> int | None:
        """How many positions of a prompt ``picture``, uint8 ``[height, width, 3]``, would take, before anything is
        prepared or encoded. None: it can't say. Raises ValueError for one that the model's processor refuses. Blocks.
        Asked of engines, and of what ``start_encoder`` started, whose facts have an ``image_token_id``."""
        return None

    def prepare_prompt(self, prompt: PicturePrompt) -> ReadyPrompt:
        """Blocks while the model's processor works. Asked of engines whose facts have an ``image_token_id``. Raises
        ValueError for a prompt that it refuses. What it holds, handles included, is used up by the request that takes
        it, or by :meth:`drop_prompt`."""
        raise LookupError("this engine takes no pictures in prompts")

    def drop_handles(self, handles: Mapping[str, Any]) -> None:
        """Lets go of what an encoder made, where no prompt was made of it. Blocks."""
        raise LookupError("this engine takes no handles")

    def drop_prompt(self, prompt: ReadyPrompt) -> None:
        """Lets go of a prompt that no request takes. Blocks."""
        raise LookupError("this engine takes no pictures in prompts")

    def generate_ready(self, prompt: ReadyPrompt, sampling_params: Any, **asked: Any) -> Result:
        """As :meth:`generate_async`, which has the rest of the arguments, with a prompt that was prepared."""
        raise LookupError("this engine takes no pictures in prompts")

    def put_embedding(self, key: bytes, rows: SharedTensor) -> Awaitable[None]:
        """For prompts submitted from now on, until it is dropped. Done once the file was read, which may go then.
        Raises ValueError for rows that the model can't use; EmbeddingGone or EmbeddingUnreachable for rows that stayed
        on an encoder's device and can't be had from there: they can be made again."""
        raise LookupError("this engine takes no embeddings")

    def drop_embeddings(self, keys: Sequence[bytes]) -> None:
        """What was submitted before keeps what it needs."""
        raise LookupError("this engine takes no embeddings")

    def encode(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        """Handles to the embeddings of a prompt's pictures, as JSON can carry them, for one
        :meth:`prepare_prompt` or :meth:`drop_handles`; blocks. Asked of what ``start_encoder`` started, where its
        facts have an ``image_token_id``. Raises ValueError for a prompt that it refuses, or makes nothing of."""
        raise LookupError("this engine makes no handles")

    async def encode_pixels(
        self, pixels: SharedTensor, grid: tuple[int, int, int] | None, *, on_device: bool = False
    ) -> TowerOutput:
        """One prepared picture's embedding; concurrent calls share batches. Asked of what ``start_encoder`` started,
        where :attr:`EngineApi.missing_media` is given. The file of ``pixels`` has to stay until then. ``on_device``:
        the rows may stay on the encoder's device, for an engine of the same host. Raises ValueError for pixels that
        are none of this model's."""
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
    ended for another reason. None: this engine takes no embeddings."""
    gpus_of: Callable[[Mapping[str, Any]], int] = lambda config: 1
    """GPUs of one worker, on all of its nodes, by its engine config."""
    can_be_deterministic: bool = False  # True: ``deterministic`` beside the config keeps a request's bits in any batch
    aborts_transfers: bool = True  # False: an abort during a KV transfer leaks blocks, so it waits for the first token
    dies_of_stalls: bool = False  # True: no step for a while with requests open is a death, whatever is_alive says
    shutdown_seconds: float = 20.0  # longest wait for Engine.shutdown


def stated(values: Any) -> dict[str, Any]:
    """The fields of one of the LLM API's dataclasses that hold something: which there are differs by version."""
    return {one.name: value for one in fields(values) if (value := getattr(values, one.name)) is not None}

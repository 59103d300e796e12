"""What the two ends of the engine's socket say to each other, as msgspec structs. Nothing here does anything."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.sampling_plan import SamplingPlan

MEDIA_KEY_BYTES = 32
"""Of a :class:`MediaSpan`'s key."""


class Logprob(NamedTuple):
    """Log-probability of one token and its rank (1 is the most likely), as TensorRT-LLM's ``Logprob``."""

    logprob: float
    rank: int | None = None


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One item of media in a prompt: positions ``[start, start + length)`` hold copies of a placeholder id, and are
    computed from the ``length`` rows of the embedding under ``key`` in place of the placeholder's own.

    ``key``: ``MEDIA_KEY_BYTES`` of the item's content and of whatever makes an embedding of it. Two items with
    one key are one to the engine: they share an embedding, and blocks of the prefix cache.
    ``grid``: rows of merged patches (t, h, w), of models whose positions need it; None for all others.
    ``time_step``: positions in time from one step of the grid to the next, as far as whole ones are reached; a video's.
    ``first``, ``rows``: where the span is a part of an embedding, from which of its rows on, and how many that has;
    0 rows: the span is all of it.
    """

    start: int
    length: int
    key: bytes
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0
    first: int = 0
    rows: int = 0


class Handoff(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request's part in a handoff, asked for or answered: what an engine reads of ``DisaggregatedParams``."""

    request_type: Literal["context_only", "generation_only"]
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[dict[int, Logprob]] | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    opaque_state: bytes | None = None
    media: list[MediaSpan] | None = None  # the prompt's: blocks have the same names on both sides


# --- to the engine ---


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """The first message, once."""

    args: LlmArgs


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True, omit_defaults=True):
    """One sequence (one choice of a request)."""

    sequence_id: int
    prompt_token_ids: list[int]
    sampling: SamplingPlan
    cache_salt: str | None = None
    priority: float = 0.5
    handoff: Handoff | None = None
    media: list[MediaSpan] = []  # by start, none overlapping
    # What KV events say in place of the prompt's ids: a router that knows media by ids of its own finds them by these.
    # As long as the prompt; None: blocks with media in them, and those after them, are not told of.
    routing_token_ids: list[int] | None = None


class PutEmbedding(msgspec.Struct, frozen=True, tag="put_embedding", array_like=True):
    """For prompts that are submitted after it, until it is dropped. Answered with :class:`EmbeddingTaken`."""

    key: bytes
    tensor: SharedTensor


class DropEmbeddings(msgspec.Struct, frozen=True, tag="drop_embeddings", array_like=True):
    """Sequences submitted before it keep what they need. Unknown keys are none."""

    keys: list[bytes]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    sequence_ids: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    pass


# --- from the engine ---


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    num_blocks: int
    tokens_per_block: int
    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    device_memory_bytes: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    text: str
    is_usage: bool = False  # the caller's arguments are at fault, and text is for a person


class KvTransfer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What became of the prompt's KV that a sequence was to take from its peer. Nothing but defaults: the own prefix
    cache had all of it."""

    bytes: int = 0
    seconds: float = 0.0  # from the beginning of the read to its end; 0: nothing came
    recomputed_because: str = ""  # why the prompt was computed here in place of it; empty: it was not


class Update(msgspec.Struct, array_like=True, omit_defaults=True):
    """What is new about one sequence after one step."""

    sequence_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # a stop token id; the caller's side makes it a stop string
    logprobs: list[dict[int, Logprob]] | None = None  # aligned with token_ids
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    reused_blocks: int = 0
    handoff: Handoff | None = None
    error: str | None = None  # a RequestError's text; the sequence has ended
    is_failure: bool = False  # the error is not the request's: RequestFailed
    media_needed: list[bytes] | None = None  # keys for lack of which it failed: MediaNeeded
    transfer: KvTransfer | None = None  # once, of a sequence that was to read a peer's KV


class EmbeddingTaken(msgspec.Struct, frozen=True, tag="embedding_taken", array_like=True):
    """The file of a :class:`PutEmbedding` was read and may be removed, whatever came of it."""

    key: bytes
    error: str | None = None  # why it can't be used; the engine goes on, and sequences that need it end
    is_failure: bool = False  # whoever made the embedding is not at fault
    # It stayed on an encoder's device, and is not to be had from there: this one any more, or none ever.
    lost: Literal["", "gone", "unreachable"] = ""


class HandoffStats(msgspec.Struct, array_like=True):
    """Totals since the engine started."""

    reads: int = 0
    bytes: int = 0
    seconds: float = 0.0  # summed over reads
    failed_reads: int = 0
    recomputed: int = 0  # requests whose prompt was computed here because the prefill side was gone or late
    leases: int = 0  # held now
    expired_leases: int = 0
    corrupted: int = 0  # reads that a planted fault made wrong on purpose, of requests that went on with them


class StepReport(msgspec.Struct, frozen=True, tag="step", array_like=True, omit_defaults=True):
    """Everything that one step changed: one message, whatever the number of sequences."""

    updates: list[Update]
    stats: dict[str, Any] | None = None  # one row, TensorRT-LLM's keys
    kv_events: list[dict[str, Any]] | None = None
    handoff_stats: HandoffStats | None = None  # when they changed
    device_memory_bytes: int | None = None  # now and then


ToEngine = Start | Submit | PutEmbedding | DropEmbeddings | Abort | Shutdown
FromEngine = Progress | Ready | Fatal | EmbeddingTaken | StepReport

# The first use of these types happens here, in the one thread that imports: see llm_args.
msgspec.msgpack.Decoder(ToEngine)
msgspec.msgpack.Decoder(FromEngine)

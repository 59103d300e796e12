"""Messages between the caller's process and the engine's process, as msgspec structs. No logic here."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from trtx.ipc.child_messages import Fatal, Progress, Shutdown
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.sampling_plan import SamplingPlan

MEDIA_KEY_BYTES = 32
"""Length of a :class:`MediaSpan`'s key in bytes."""


class Logprob(NamedTuple):
    """Log-probability of one token and its rank (1 is the most likely), like TensorRT-LLM's ``Logprob``."""

    logprob: float
    rank: int | None = None


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Placeholder range of one media item: positions ``[start, start + length)`` of a prompt hold a placeholder id.

    The engine replaces the placeholder's token embeddings by ``length`` rows of the media embedding under ``key``.

    ``key``: ``MEDIA_KEY_BYTES`` that identify the item's content and everything that its embedding depends on. Items
    with equal keys share an embedding and prefix cache blocks. ``grid``: merged patches (t, h, w), for models whose
    positions depend on it; None for all others. ``time_step``: for videos, time positions between two steps of the
    grid, before truncation to an integer. ``first``, ``rows``: for a range that uses a part of an embedding, the first
    row of that part and the row count of the whole embedding. ``rows`` 0: the range uses the whole embedding.
    """

    start: int
    length: int
    key: bytes
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0
    first: int = 0
    rows: int = 0


class Handoff(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The handoff fields of a request or of its answer: the part of ``DisaggregatedParams`` that the engine reads."""

    request_type: Literal["context_only", "generation_only"]
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[dict[int, Logprob]] | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    opaque_state: bytes | None = None
    media: list[MediaSpan] | None = None  # the prompt's media, so that both engines compute the same block names


MemoryTag = Literal["kv_cache", "model_weights"]
"""Memory that a sleeping engine gives back, named as in TensorRT-LLM."""
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "model_weights")


class Retained(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How long a block is kept: by its priority from 0 to 100, for ``duration_s`` after its last use or for good."""

    priority: int
    duration_s: float | None = None


class RetainedRange(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Retention of the blocks that begin at positions ``[start, end)`` of the prompt; ``end`` None: to its end."""

    start: int
    retained: Retained
    end: int | None = None


class KvRetention(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Retention of a request's blocks. Where it is None, blocks keep the retention that they had before."""

    ranges: list[RetainedRange] = []
    decode: Retained | None = None  # of blocks of generated tokens


# --- to the engine ---


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True, omit_defaults=True):
    """The first message, sent once."""

    args: LlmArgs
    batched_processor: bytes | None = None  # pickled; the argument batched_logits_processor of LLM
    import_path: list[str] = []  # the caller's sys.path, to load pickled logits processors


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True, omit_defaults=True):
    """Submits one sequence, i.e. one choice of a request."""

    sequence_id: int
    prompt_token_ids: list[int]
    sampling: SamplingPlan
    cache_salt: str | None = None
    priority: float = 0.5
    handoff: Handoff | None = None
    media: list[MediaSpan] = []  # ordered by start, without overlaps
    # Token ids that KV events report in place of the prompt's ids, for a router that identifies media by ids of its
    # own. As long as the prompt. None: events omit blocks that contain media, and all blocks after them.
    routing_token_ids: list[int] | None = None
    processors: bytes | None = None  # a pickled list of logits processors
    follows: int | None = None  # an earlier choice with the same prompt, whose KV this sequence can share
    retention: KvRetention | None = None


class PutEmbedding(msgspec.Struct, frozen=True, tag="put_embedding", array_like=True):
    """Makes a media embedding available to prompts submitted later, until it is dropped.

    The engine answers with :class:`EmbeddingTaken`.
    """

    key: bytes
    tensor: SharedTensor


class DropEmbeddings(msgspec.Struct, frozen=True, tag="drop_embeddings", array_like=True):
    """Drops embeddings. Sequences submitted earlier keep the ones that they need. Unknown keys are ignored."""

    keys: list[bytes]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    sequence_ids: list[int]


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory", array_like=True):
    """Releases memory as soon as no sequence is open and no handoff is unread. Fails if that takes longer than
    ``timeout_s``.

    The engine answers with :class:`MemoryDone`, as it does to the next two messages.
    """

    tags: list[MemoryTag]
    timeout_s: float


class ResumeMemory(msgspec.Struct, frozen=True, tag="resume_memory", array_like=True):
    """Allocates released memory again. Afterwards the KV cache is empty, and the weights are as they were before."""

    tags: list[MemoryTag]


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", array_like=True):
    """Replaces the weights by those of another checkpoint, once the engine is idle as for ReleaseMemory."""

    model: str
    timeout_s: float


# --- from the engine ---


class SharedCopy(msgspec.Struct, frozen=True, array_like=True):
    """The weights that an engine shares. ``mapped_from``: the engine from which it has them; None: it loaded them."""

    num_bytes: int
    mapped_from: str | None = None

    @property
    def source(self) -> str:
        return "loaded" if self.mapped_from is None else "mapped"


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    num_blocks: int
    tokens_per_block: int
    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    device_memory_bytes: int
    shared_weights: SharedCopy | None = None


class KvTransfer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Outcome of the KV read of a generation_only sequence.

    If all fields have their defaults, the local prefix cache had the whole prompt.
    """

    bytes: int = 0
    seconds: float = 0.0  # from the start of the read to its end; 0: no data was read
    recomputed_because: str = ""  # why the engine computed the prompt locally instead; empty: it did not


class EngineTimes(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Where one sequence spent its time inside the engine, in seconds. None: unknown, or there was no such part."""

    # When it arrived, on the monotonic clock that all processes of a machine share. None: on another clock.
    arrived_s: float | None = None
    queue_s: float | None = None  # from its arrival until it got a slot and blocks
    prefill_s: float | None = None  # from then, or from a failed read, until the first token that it computed here
    read_s: float | None = None  # from then until the prefill side's KV had arrived
    first_step_s: float | None = None  # from the end of the read until the first token computed here
    decode_s: float | None = None  # from the first token computed here until the last one
    # The parts of these times in which the step loop waited for the device: little if the host was the slower one. On a
    # CPU the step loop computes the model itself, and that counts. None: not known.
    prefill_wait_s: float | None = None
    device_wait_s: float | None = None


class Update(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step changed for one sequence."""

    sequence_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # a stop token id; the caller's side sets a stop string
    logprobs: list[dict[int, Logprob]] | None = None  # aligned with token_ids
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    reused_blocks: int = 0
    handoff: Handoff | None = None
    error: str | None = None  # text of a RequestError; the sequence has ended
    is_failure: bool = False  # the request did not cause the error: RequestFailed
    media_needed: list[bytes] | None = None  # keys of embeddings that were missing: MediaNeeded
    transfer: KvTransfer | None = None  # sent once, for a sequence that was to read KV from a peer
    times: EngineTimes | None = None  # with the first token that the engine computed, and with the last

    def extend(self, later: Update) -> None:
        """Appends the tokens of a later update, and takes over its end. Keeps logprobs only if it has some itself."""
        self.token_ids += later.token_ids
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class EmbeddingTaken(msgspec.Struct, frozen=True, tag="embedding_taken", array_like=True):
    """The engine is done with the file of a :class:`PutEmbedding`, successfully or not; the sender may remove it."""

    key: bytes
    error: str | None = None  # why the embedding is unusable; the engine goes on, sequences that need it fail
    is_failure: bool = False  # the sender of the embedding did not cause the error
    # The embedding stayed on an encoder's device and can't be read there: this embedding is gone, or no embedding on
    # that device is reachable.
    lost: Literal["", "gone", "unreachable"] = ""


class MemoryDone(msgspec.Struct, frozen=True, tag="memory_done", array_like=True, omit_defaults=True):
    """The result of ReleaseMemory, ResumeMemory or UpdateWeights."""

    parked: list[MemoryTag]  # what is released now
    device_memory_bytes: int
    error: str | None = None  # why nothing was done


class HandoffStats(msgspec.Struct, array_like=True):
    """Handoff totals since the engine started."""

    reads: int = 0
    bytes: int = 0
    seconds: float = 0.0  # summed over reads
    failed_reads: int = 0
    recomputed: int = 0  # prompts computed locally because the prefill side was gone or late
    leases: int = 0  # currently held
    expired_leases: int = 0
    corrupted: int = 0  # reads corrupted by an injected fault, whose requests went on


class StepReport(msgspec.Struct, frozen=True, tag="step", array_like=True, omit_defaults=True):
    """All changes of one step in one message, whatever the number of sequences."""

    updates: list[Update]
    stats: dict[str, Any] | None = None  # one row with TensorRT-LLM's keys
    kv_events: list[dict[str, Any]] | None = None
    handoff_stats: HandoffStats | None = None  # only if they changed
    device_memory_bytes: int | None = None  # sent every few seconds


MemoryRequest = ReleaseMemory | ResumeMemory | UpdateWeights
ToEngine = Start | Submit | PutEmbedding | DropEmbeddings | Abort | MemoryRequest | Shutdown
FromEngine = Progress | Ready | Fatal | EmbeddingTaken | MemoryDone | StepReport

# The first use of these types happens here, in the importing thread: see llm_args.
msgspec.msgpack.Decoder(ToEngine)
msgspec.msgpack.Decoder(FromEngine)

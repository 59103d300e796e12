"""Contract between the scheduler (policy) and the model runner (tensors): what one step computes and returns.

Imports no torch. A step is ``schedule -> ModelRunner.launch(batch) -> LaunchedStep.results() -> commit``. The next step
may be launched before the caller asks for this step's results.

If a sequence of the batch follows a grammar or has logits processors, ``launch`` starts only the forward. The tokens
that the grammar allows, and the call of a processor, depend on the previous step's token. So the caller commits the
previous step while the device computes, writes the allowed tokens to ``ModelRunner.masks``, and calls
``LaunchedStep.sample``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.messages import Logprob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from trtx.ipc.shared_tensor import SharedTensor
    from trtx.torch_engine.drafting import DraftModel
    from trtx.torch_engine.messages import MediaSpan, MemoryTag, SharedCopy
    from trtx.torch_engine.sampling_plan import SamplingPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepEmbedding:
    """The embedding of one media item, in the runner's memory. The scheduler uses only its row count."""

    rows: int
    tensor: torch.Tensor  # [rows, hidden]; wider if the model's first layers add extra vectors


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Maps a sequence's new tokens ``[offset, offset + count)`` to rows ``[first, first + count)`` of an embedding."""

    offset: int
    embedding: StepEmbedding
    first: int
    count: int


FROM_SLOT = -1
"""In place of a decode's token id: use the token that the previous step sampled in the same slot.

The device has that token already; the host has not asked for the previous step's results yet.
"""


LogitsEdit = Callable[[Mapping[int, "torch.Tensor"], int | None], None]
"""Edits logits in place: those [1, 1, vocab] of each sequence of a step with ``is_processed``, by slot.

The second argument points to the CUDA stream of the logits, which is the current one; None on a CPU.
"""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence's share of one step. After ``launch`` returns, the runner keeps only its own copies.

    ``slot`` is the sequence's row in the runner's persistent state: unique among running sequences,
    ``0 <= slot < max_batch_size``, and stable from admission until the sequence finishes or is preempted. ``is_first``
    is True in the first step after the sequence took the slot; the runner then resets that row.

    ``block_ids`` are the sequence's own block lists, one for each KV cache group, all of the same length. They only
    grow while the sequence holds the slot, so the runner may remember how many entries it has copied. Entries before a
    group's window are stale and must never be read. The step computes positions
    ``[start, start + len(new_token_ids))``.
    """

    slot: int
    is_first: bool
    new_token_ids: list[int]  # token ids, or FROM_SLOT alone
    start: int
    block_ids: list[list[int]]
    samples: bool  # sample from the last new token's logits (False: a prompt chunk that is not the last)
    sampling: SamplingPlan
    prompt_token_ids: list[int]  # for penalties and prompt logprobs; do not mutate
    output_token_ids: list[int]  # generated tokens that the host knows; do not mutate
    seed: int  # resolved: the request's own, or drawn at admission
    banned_ids: tuple[int, ...] = ()  # must not be sampled in this step: min_tokens is not reached
    media: Sequence[MediaSpan] = ()  # of the whole prompt
    embeddings: tuple[EmbeddingRows, ...] = ()  # media rows that replace placeholder ids in new_token_ids
    is_guided: bool = False  # follows a grammar, so that the caller may limit its tokens: see LaunchedStep.sample
    is_processed: bool = False  # has logits processors, so that the caller may edit its logits: see LaunchedStep.sample
    # The last num_drafts of new_token_ids are drafted (speculation). A token is sampled from the logits of each of the
    # last 1 + num_drafts new tokens, as if all drafted tokens before it were output tokens.
    num_drafts: int = 0
    dropped_token_ids: Sequence[int] = ()  # sampled by the last step after a rejected draft token: not in the output


@dataclass(slots=True, eq=False)
class Batch:
    """The sequences of one step: decodes first, then prompt chunks.

    A decode computes one new token, samples, has ``start > 0``, and uses no media rows. A decode with drafted tokens
    counts as a prompt chunk.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)

    @property
    def waits_for_tokens(self) -> bool:
        """True if a sequence can be sampled only once the host knows its earlier tokens.

        The step then samples in ``LaunchedStep.sample``.
        """
        return any((sequence.is_guided or sequence.is_processed) and sequence.samples for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sampled:
    """Result of one step for one sequence. ``token_id`` is None for a prompt chunk that does not sample.

    If ``error`` is set, ignore the other fields and end the sequence (e.g. its logits were not finite). Unlike an
    exception, an error leaves the runner and all other sequences intact.
    """

    token_id: int | None
    logprobs: dict[int, Logprob] | None = None  # sampled token and top-k, like TensorRT-LLM's CompletionOutput
    # Logprobs of the prompt tokens that follow this step's tokens. The lists of all chunks together have one entry
    # fewer than the prompt has tokens, because the first token has none. Tokens taken from the prefix cache have none
    # either.
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    after_drafts: list[Sampled] = field(default_factory=list)  # for each drafted token: what was sampled after it


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """How evenly the routers spread tokens over experts since the balance was last read.

    An imbalance is the load of the busiest one divided by the mean load, averaged over the layers. 1 means even.
    """

    tokens: int  # since the start: each token counts once for each of its experts in each layer
    busiest_expert: float
    busiest_rank: float | None  # None: one rank holds all experts


class LaunchedStep(Protocol):
    """A step that the device is computing or has computed."""

    def sample(self, slots: Sequence[int] = (), edit: LogitsEdit | None = None, masks_per_slot: int = 1) -> None:
        """Starts to sample, for a batch that ``waits_for_tokens``; call it once, before :meth:`results`.

        First, ``edit`` is called once with the model's logits. Then row ``i * masks_per_slot`` of ``ModelRunner.masks``
        limits the next token of the sequence in ``slots[i]``, and the rows after it limit the tokens after its drafted
        ones. All other sequences sample from the whole vocabulary. Penalties, banned ids and temperature follow. The
        previous step must be committed, because its masks are overwritten.
        """

    def results(self) -> list[Sampled]:
        """Waits for the step and returns one result for each of the batch's ``sequences``, in their order.

        Call it exactly once for each step, in launch order. When it returns, every reader of the pool (a peer included)
        sees what the step wrote, and the step no longer accesses the pool.
        """


class ModelRunner(Protocol):
    """Owns weights, KV pool and device. Lives in the engine's process."""

    geometry: KvGeometry
    num_blocks: int
    pool: torch.Tensor  # [num_blocks, *geometry.block_shape], contiguous
    max_position: int  # longest sequence that the model's positions allow
    vocab_size: int
    needs_grids: bool  # of media: the model's positions depend on them
    paced_steps: int | None  # the prefill token budget's setting for this runner: see SchedulerLimits
    is_asynchronous: bool  # launch returns before the device has computed
    # [max_batch_size * (1 + max_draft_len), words] in host memory: bit t of a row is 1 if token t may be sampled. None:
    # the runner was built without guided decoding.
    masks: npt.NDArray[np.int32] | None
    draft_model: DraftModel | None  # None: drafts need no model

    @property
    def graph_misses(self) -> int | None:
        """Forwards since the start that no CUDA graph of their kind could hold; None: the runner has no graphs."""

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """The load of experts, which some steps update with their results; None: unknown, or a dense model."""

    @property
    def shared_weights(self) -> SharedCopy | None:
        """The weights that other engines of the host use too; None: this engine has a copy of its own."""

    def launch(self, batch: Batch) -> LaunchedStep:
        """Starts to write KV for every new token and to sample where requested; does not wait for results.

        A batch that ``waits_for_tokens`` samples only when the caller asks the step to.

        Steps run in launch order. At most one earlier step may still have its ``results`` outstanding.
        """

    def load_embedding(self, shared: SharedTensor) -> StepEmbedding:
        """Copies a media embedding into the runner's memory. Safe in any thread, concurrently with ``launch``.

        Raises ValueError if the embedding is gone, or is not ``[rows, hidden]`` finite numbers in the model's dtype;
        EmbeddingGone or EmbeddingUnreachable if it stayed on an encoder's device and can't be read from there.
        """

    def release(self, tags: Collection[MemoryTag]) -> None:
        """Releases memory, with no step in flight. Nothing may be launched until the memory is restored.

        Only for a runner whose arguments allow it.
        """

    def restore(self, tags: Collection[MemoryTag]) -> None:
        """Allocates released memory again at the same addresses. The pool is empty then, and the weights are as before.

        Raises UsageError, and changes nothing, if there is too little memory or the weights can't be read again.
        """

    def update_weights(self, model_dir: Path) -> None:
        """Replaces the weights, with no step in flight. The KV in the pool still belongs to the old weights. Updates
        ``geometry``.

        Raises UsageError, and changes nothing, for a checkpoint of another config.
        """

    def device_memory_bytes(self) -> int:
        """Bytes of device memory that this process holds, for the launcher's table; 0 on a CPU."""

    def close(self) -> None: ...

"""The seam between policy and tensors: what the scheduler hands to the model runner, and what comes back.

Nothing here imports torch. A step is ``schedule -> ModelRunner.launch(batch) -> LaunchedStep.results() -> commit``. The
next step may be launched before this one's results are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.messages import Logprob

if TYPE_CHECKING:
    import torch

    from trtx.ipc.shared_tensor import SharedTensor
    from trtx.torch_engine.messages import MediaSpan
    from trtx.torch_engine.sampling_plan import SamplingPlan


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """One item of media as the decoder takes it, where the runner wants it. Policy counts its rows, and no more."""

    rows: int
    tensor: torch.Tensor  # [rows, hidden], wider where the model's first layers add vectors of their own


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Of a share's new tokens, ``[offset, offset + count)`` are rows ``[first, first + count)`` of an embedding."""

    offset: int
    embedding: Embedding
    first: int
    count: int


FROM_SLOT = -1
"""In place of a decode's token: the one that its slot's row sampled last, in a step whose results nobody has asked for
yet. The device knows it, the host does not."""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence's share of one step. The runner keeps nothing of it past ``launch`` but its own copies.

    ``slot`` is the row of the runner's persistent per-sequence state: unique among running sequences,
    ``0 <= slot < max_batch_size``, and stable from admission to finish or preemption. ``is_first`` is
    true on the first step after the sequence took the slot (the runner then resets that row).
    ``block_ids`` are the sequence's own lists, one a layer group and all of one length, append-only while it
    holds the slot: the runner may keep how many of their entries it has copied. Entries before a group's
    window are nobody's: never to be read. Positions ``[start, start + len(new_token_ids))`` are computed.
    """

    slot: int
    is_first: bool
    new_token_ids: list[int]  # known ones, or FROM_SLOT alone
    start: int
    block_ids: list[list[int]]
    samples: bool  # the last new token's logits produce a token (False: a prompt chunk before the last)
    sampling: SamplingPlan
    prompt_token_ids: list[int]  # for penalties and prompt logprobs; do not mutate
    output_token_ids: list[int]  # tokens generated before this step, as far as the host has them; do not mutate
    seed: int  # resolved: the request's own, or one drawn at admission
    banned_ids: tuple[int, ...] = ()  # of the vocabulary, that this step must not sample: min_tokens is not reached
    media: Sequence[MediaSpan] = ()  # of the whole prompt
    embeddings: tuple[EmbeddingRows, ...] = ()  # what of new_token_ids is media: their ids are placeholders


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences of one step, decodes (one new token that samples, ``start > 0``, no media, and none of a prompt with a
    video) before prompt chunks."""

    sequences: list[ScheduledSequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sampled:
    """What one sequence got from one step. ``token_id`` is None for a prompt chunk that does not sample.

    With ``error`` set the rest means nothing, and the sequence must end: its numbers are no numbers, say. The runner
    and every other sequence are unharmed, which is what tells it from an exception.
    """

    token_id: int | None
    logprobs: dict[int, Logprob] | None = None  # chosen token and top-k, as TensorRT-LLM's CompletionOutput
    # Of the prompt tokens that follow this step's: a prompt computed whole gives one entry fewer than it has tokens,
    # its chunks' lists joined the same. The first token has none; tokens taken from the prefix cache have none either.
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None


class LaunchedStep(Protocol):
    """A step that the device computes, or has computed."""

    def results(self) -> list[Sampled]:
        """Waits for the step. To be asked once, in the order of launches; aligned with the batch's ``sequences``.

        When it returns, what the step wrote to the pool is visible to whoever reads the pool, a peer too, and the step
        reads and writes there no more.
        """


class ModelRunner(Protocol):
    """Owns weights, KV pool and device. Lives in the engine's own process."""

    geometry: KvGeometry
    num_blocks: int
    pool: torch.Tensor  # [num_blocks, *geometry.block_shape], contiguous
    max_position: int  # longest sequence the model's positions allow
    vocab_size: int
    needs_grids: bool  # of media: its positions depend on them
    paced_steps: int | None  # what suits it best: see SchedulerLimits

    def launch(self, batch: Batch) -> LaunchedStep:
        """Begins to write KV for every new token, and to sample where asked; waits for no result.

        Steps run in the order of their launches. At most one launched before may still be without its ``results``.
        """

    def load_embedding(self, shared: SharedTensor) -> Embedding:
        """Copies an embedding to where ``launch`` takes it from. From any thread, beside a ``launch``.

        Raises ValueError, a sentence, for one that is gone or not ``[rows, hidden]`` finite numbers in the model's
        dtype; EmbeddingGone or EmbeddingUnreachable for one that stayed on an encoder's device and can't be had there.
        """

    def device_memory_bytes(self) -> int:
        """Memory of the device that this process holds, for the launcher's table; 0 on a CPU."""

    def close(self) -> None: ...

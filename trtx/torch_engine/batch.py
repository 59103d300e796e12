"""The seam between policy and tensors: what the scheduler hands to the model runner, and what comes back.

Nothing here imports torch. A step is ``schedule -> ModelRunner.launch(batch) -> LaunchedStep.results() -> commit``. The
next step may be launched before this one's results are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Protocol

from trtx.config.torch_groups import block_layers
from trtx.torch_engine.messages import Logprob

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.messages import MediaSpan
    from trtx.torch_engine.sampling_plan import SamplingPlan
    from trtx.torch_engine.shared_tensor import SharedTensor


def first_block(window: int | None, num_tokens: int, tokens_per_block: int) -> int:
    """The first block that a query at position ``num_tokens``, or at any later one, sees through ``window``."""
    return 0 if window is None else max(0, num_tokens - window + 1) // tokens_per_block


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the same of a sequence's past. A sequence has one list of blocks for each group."""

    layers: tuple[int, ...]  # ascending, from 0
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # a query sees so many positions, its own the last of them; None: all before it
    kind: str = "attention"  # what a block keeps of a token: keys and values of heads

    def __str__(self) -> str:
        reach = "all positions" if self.window is None else f"a window of {self.window}"
        heads = f"{self.num_kv_heads} KV heads of {self.head_dim}"
        return f"{self.kind} of {_spans(self.layers)} to {reach}, {heads}"


def _spans(layers: tuple[int, ...]) -> str:
    """Evenly spaced layers in short: ``layers 0, 2, … 22``."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if len(layers) > 3 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"layers {layers[0]}, {layers[1]}, … {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def layer_groups(windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> tuple[LayerGroup, ...]:
    """Of a model whose layers see through ``windows``, one a layer: as many in a group as blocks hold."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = block_layers(windows)
    return tuple(
        LayerGroup(tuple(kinds[window][begin : begin + size]), num_kv_heads, head_dim, window)
        for window in sorted(kinds, key=lambda window: (window is not None, window or 0))
        for begin in range(0, len(kinds[window]), size)
    )


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What KV blocks look like. Pool: ``[num_blocks, num_kv_heads, block_layers, 2, tokens_per_block, head_dim]``.

    A block holds all layers of one group: one contiguous range of ``block_bytes`` bytes. Heads come first in it, so
    that some heads of all its layers are one range too, and a head's tokens in a layer lie one after the other. Blocks
    of all groups have one shape, so that any block of the pool serves any group; what a group with fewer layers leaves
    of it is padding. Raises ValueError for groups that no such blocks hold.
    """

    groups: tuple[LayerGroup, ...]  # the first is one that sees all positions, where there is one
    tokens_per_block: int
    dtype: str  # torch's name without "torch.": "float32", "bfloat16", "float8_e4m3fn"
    scales: str = ""  # of a float8 pool: digest of what its values are multiplied with, equal for equal checkpoints
    # Of an engine whose answers are the same to the bit however they are computed: what its bits depend on beside the
    # checkpoint. KV of another arithmetic would break that. "": the engine promises nothing of the kind.
    arithmetic: str = ""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ValueError(f"groups of layers {layers}; expected every layer of the model in one of them")
        if len({(group.num_kv_heads, group.head_dim, group.kind) for group in self.groups}) > 1:
            raise ValueError(f"groups {', '.join(map(str, self.groups))}; expected heads of one shape in one pool")

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        dtype: str,
        scales: str = "",
        arithmetic: str = "",
    ) -> KvGeometry:
        """Of layers that all see all positions: one group."""
        group = LayerGroup(tuple(range(num_layers)), num_kv_heads, head_dim)
        return cls((group,), tokens_per_block, dtype, scales, arithmetic)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One a group."""
        return tuple(group.window for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer: its group, and its index in a block of that."""
        found = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    @property
    def block_layers(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(num_kv_heads, block_layers, 2, tokens_per_block, head_dim)``: a block as it lies in memory."""
        first = self.groups[0]
        return first.num_kv_heads, self.block_layers, 2, self.tokens_per_block, first.head_dim

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype_bytes


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
